package main

import "golang.org/x/sys/unix"

// mayWrite tells whether this user may make files in a folder, and the file system lets anybody.
func mayWrite(dir string) error { return unix.Access(dir, unix.W_OK|unix.X_OK) }
