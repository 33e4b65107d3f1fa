// Package flock locks open files and directories among processes. A lock belongs to the open file,
// also when its descriptor was sent to other processes, and ends with the last descriptor. The
// daemon locks its state directory exclusively, and clients have leases on views. The package is
// safe for concurrent use.
package flock

import (
	"os"

	"golang.org/x/sys/unix"
)

// TryLock takes an exclusive lock on the open file.
func TryLock(f *os.File) (bool, error) { return try(f, unix.LOCK_EX) }

// TryShare takes a shared lock on the open file. It fails while another process has an exclusive
// one.
func TryShare(f *os.File) (bool, error) { return try(f, unix.LOCK_SH) }

func try(f *os.File, how int) (bool, error) {
	err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK {
		return false, nil
	}
	return err == nil, err
}

// Lease takes a lease on the open directory. It is a read lock of fcntl and not one of flock,
// because any holder of the descriptor could make a flock exclusive, and block others. A write lock
// needs a descriptor that writes, which no directory has.
func Lease(dir *os.File) error {
	_, err := fcntl(dir, unix.F_OFD_SETLK, unix.F_RDLCK)
	if err == unix.EINVAL { // a kernel without these locks
		err = unix.Flock(int(dir.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	}
	return err
}

// Leased reports whether another open file has a lease on the directory, or a flock, which earlier
// versions used as the lease.
func Leased(dir *os.File) (bool, error) {
	if found, err := fcntl(dir, unix.F_OFD_GETLK, unix.F_WRLCK); err == nil &&
		found != unix.F_UNLCK {
		return true, nil
	}
	free, err := TryLock(dir)
	return !free && err == nil, err
}

func fcntl(f *os.File, how int, kind int16) (found int16, err error) {
	lock := unix.Flock_t{Type: kind} // of all bytes
	err = unix.FcntlFlock(f.Fd(), how, &lock)
	return lock.Type, err
}
