//go:build !linux

package views

import (
	"errors"
	"os"
)

// HeldBytes is not known here.
func (vs *Store) HeldBytes() int64 { return 0 }

func openedBy(string, *OwnFiles) Opener { return ByNobody }

// OwnFiles are the files that this process has open.
type OwnFiles struct{}

func openFolder(string) (*os.File, error) { return nil, errors.ErrUnsupported }
