// Package flock locks open files and folders among processes: one lock for all descriptors of one open file, wherever they were sent, which ends
// with the last of them. The lease on a view is a shared one; who has the state folder open, or takes a view away, has an exclusive one. It keeps
// nothing in memory, and any number of goroutines may use it.
package flock

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// TryLock takes an exclusive lock on the open file, which lasts until it is closed everywhere.
func TryLock(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK {
		return false, nil
	}
	return err == nil, err
}

// Share takes a shared lock on the open file. Who looks whether anybody holds it has it alone for a moment.
func Share(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	for began := time.Now(); err == unix.EWOULDBLOCK && time.Since(began) < lockMoment; {
		time.Sleep(100 * time.Microsecond)
		err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	}
	return err
}

const lockMoment = time.Second // bounds the wait for a lock that nobody keeps
