package main

import "golang.org/x/sys/unix"

// refusedHere are calls that later architectures do not have.
var refusedHere = []denial{
	{unix.SYS_CHMOD, unix.EPERM}, {unix.SYS_CHOWN, unix.EPERM}, {unix.SYS_LCHOWN, unix.EPERM},
	{unix.SYS_UTIME, 0}, {unix.SYS_UTIMES, 0}, {unix.SYS_FUTIMESAT, 0},
}
