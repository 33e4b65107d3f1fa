package dedupe

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// cloneBlock is the unit in which file systems share extents: both offsets have
// to be multiples of the file system's block, which is this at most on those
// that can (XFS, btrfs).
const cloneBlock = 4096

// cloneRange has two files share n bytes. What is refused the caller copies, and
// meets the true error.
func cloneRange(dst *os.File, to int64, src *os.File, from, n int64) bool {
	err := both(dst, src, func(d, s int) error {
		return unix.IoctlFileCloneRange(d, &unix.FileCloneRange{
			Src_fd: int64(s), Src_offset: uint64(from), Src_length: uint64(n), Dest_offset: uint64(to)})
	})
	return err == nil
}

// both calls fn with both descriptors, again where a signal came. It does not
// use Fd, which would set the files to blocking mode.
func both(dst, src *os.File, fn func(d, s int) error) error {
	rawDst, err := dst.SyscallConn()
	if err != nil {
		return err
	}
	rawSrc, err := src.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = rawDst.Control(func(d uintptr) {
		err := rawSrc.Control(func(s uintptr) {
			for inner = unix.EINTR; errors.Is(inner, unix.EINTR); {
				inner = fn(int(d), int(s))
			}
		})
		inner = errors.Join(inner, err)
	})
	return errors.Join(err, inner)
}
