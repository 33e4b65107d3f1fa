package main

import "golang.org/x/sys/unix"

// archRefusedCalls are calls that later architectures do not have.
var archRefusedCalls = []denial{
	{unix.SYS_CHMOD, unix.EPERM}, {unix.SYS_CHOWN, unix.EPERM}, {unix.SYS_LCHOWN, unix.EPERM},
	{unix.SYS_UTIME, 0}, {unix.SYS_UTIMES, 0}, {unix.SYS_FUTIMESAT, 0},
}

// archKnownCalls are calls that later architectures do not have.
var archKnownCalls = []uint32{
	unix.SYS_NEWFSTATAT, unix.SYS_OPEN, unix.SYS_CREAT, unix.SYS_STAT, unix.SYS_LSTAT,
	unix.SYS_ACCESS, unix.SYS_READLINK, unix.SYS_UNLINK, unix.SYS_RENAME, unix.SYS_MKDIR,
	unix.SYS_RMDIR, unix.SYS_SYMLINK, unix.SYS_LINK, unix.SYS_GETDENTS, unix.SYS_PIPE,
	unix.SYS_DUP2, unix.SYS_POLL, unix.SYS_SELECT, unix.SYS_EPOLL_CREATE, unix.SYS_EPOLL_WAIT,
	unix.SYS_EVENTFD, unix.SYS_INOTIFY_INIT, unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_ALARM,
	unix.SYS_PAUSE, unix.SYS_TIME, unix.SYS_GETPGRP, unix.SYS_ARCH_PRCTL,
}
