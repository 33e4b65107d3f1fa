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

// copyInKernel copies n bytes between two files and returns how many were
// copied. Fewer than n are no error: what the kernel or the file system will
// not do, the caller does by reading and writing, and meets the true error.
func copyInKernel(dst *os.File, to int64, src *os.File, from, n int64) int64 {
	if n < smallCopy {
		return 0
	}
	done := int64(0)
	if (from-to)%cloneBlock == 0 {
		head := (cloneBlock - to%cloneBlock) % cloneBlock
		body := (n - head) &^ (cloneBlock - 1)
		if cloneRange(dst, to+head, src, from+head, body) {
			if copyRange(dst, to, src, from, head) < head {
				return 0
			}
			done = head + body
		}
	}
	return done + copyRange(dst, to+done, src, from+done, n-done)
}

func cloneRange(dst *os.File, to int64, src *os.File, from, n int64) bool {
	err := both(dst, src, func(d, s int) error {
		return unix.IoctlFileCloneRange(d, &unix.FileCloneRange{
			Src_fd: int64(s), Src_offset: uint64(from), Src_length: uint64(n), Dest_offset: uint64(to)})
	})
	return err == nil
}

func copyRange(dst *os.File, to int64, src *os.File, from, n int64) int64 {
	done := int64(0)
	for done < n {
		r, w, k := from+done, to+done, 0
		err := both(dst, src, func(d, s int) (err error) {
			k, err = unix.CopyFileRange(s, &r, d, &w, int(n-done), 0)
			return err
		})
		if err != nil || k <= 0 {
			break
		}
		done += int64(k)
	}
	return done
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
