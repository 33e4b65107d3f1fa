//go:build !linux

package cache

import (
	"errors"
	"os"

	"github.com/epcached/epcached/cas"
)

// The cache works on Linux only; elsewhere the programs compile, and Open answers errors.ErrUnsupported.

func stampPath(string) (cas.Stamp, error) { return cas.Stamp{}, errors.ErrUnsupported }

func stampThrough(int, string) (cas.Stamp, error) { return cas.Stamp{}, errors.ErrUnsupported }

func duplicate(*os.File) (*os.File, error) { return nil, errors.ErrUnsupported }

func copyPrivate(*os.File, string) error { return errors.ErrUnsupported }

func room(string, []*os.File) error { return errors.ErrUnsupported }

const spare = 0

func machineStamp() [32]byte { return [32]byte{} }

func machineMemory() int64 { return 0 }

func fileOnDisk(string) (fileID, uint64, int64, bool) { return fileID{}, 0, 0, false }
