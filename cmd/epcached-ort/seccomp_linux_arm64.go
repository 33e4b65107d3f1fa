package main

import "golang.org/x/sys/unix"

// archRefusedCalls are calls that only this architecture has: none.
var archRefusedCalls []denial

var archKnownCalls = []uint32{unix.SYS_FSTATAT}
