package main

import "golang.org/x/sys/unix"

// refusedHere are calls that only this architecture has: none.
var refusedHere []denial

var knownHere = []uint32{unix.SYS_FSTATAT}
