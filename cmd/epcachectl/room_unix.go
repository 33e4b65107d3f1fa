//go:build linux || darwin

package main

import "golang.org/x/sys/unix"

// mayWrite tells whether this user may make files in a folder, and the file system lets anybody.
func mayWrite(dir string) error { return unix.Access(dir, unix.W_OK|unix.X_OK) }

// freeBytes is what this user may still write on the folder's file system.
func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}
