package main

import "golang.org/x/sys/unix"

// refusedHere are calls that later architectures do not have.
var refusedHere = []denial{
	{unix.SYS_CHMOD, unix.EPERM}, {unix.SYS_CHOWN, unix.EPERM}, {unix.SYS_LCHOWN, unix.EPERM},
}
