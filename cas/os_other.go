//go:build !linux

package cas

import (
	"errors"
	"os"
)

func openSafely(path string, flag int) (*os.File, error) { return os.OpenFile(path, flag, 0) }

// Clone is not to be had here.
func (OS) Clone(dst, src *os.File) error { return errors.ErrUnsupported }

// Allocate writes zeros.
func (OS) Allocate(f *os.File, size int64) error { return writeZeros(f, size) }

// LinkAt is not to be had here.
func (OS) LinkAt(from string, dir *os.File, name string) error { return errors.ErrUnsupported }

// UnlinkAt is not to be had here.
func (OS) UnlinkAt(dir *os.File, name string) error { return errors.ErrUnsupported }

// StampOf is not to be had here: a store works on Linux only.
func StampOf(f *os.File) (Stamp, error) { return Stamp{}, errors.ErrUnsupported }

// StampAt is not to be had here: a store works on Linux only.
func StampAt(dirfd int, name string) (Stamp, error) { return Stamp{}, errors.ErrUnsupported }

// Boot returns the id of this boot, which nobody tells us here.
func Boot() string { return "" }

func ownAlone(fs FS, f *os.File) (bool, error) { return false, nil }

func startWriting(f *os.File) {}

// Preallocate does nothing here.
func Preallocate(f *os.File, size int64) {}

func tooManyLinks(err error) bool { return false }

func otherDevice(err error) bool { return false }

func unreadable(err error) bool { return false }

// DiskBytes returns what the file at path takes on the disk, about.
func DiskBytes(path string) (int64, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	return diskBytesOf(info), nil
}

func diskBytesOf(info os.FileInfo) int64 { return (info.Size() + 4095) / 4096 * 4096 }
