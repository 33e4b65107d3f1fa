//go:build unix

package main

import "syscall"

// nonBlocking keeps open from waiting for the writer of a FIFO.
const nonBlocking = syscall.O_NONBLOCK
