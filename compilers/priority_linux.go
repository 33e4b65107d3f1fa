package compilers

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

const lowest = 19

func waits(idle <-chan struct{}) bool {
	select {
	case <-idle:
		return false
	default:
		return idle != nil
	}
}

func (o *ORT) raiser(idle <-chan struct{}) func(pid int, ended <-chan struct{}) {
	return func(pid int, ended <-chan struct{}) {
		if !waits(idle) {
			return
		}
		select {
		case <-idle:
			raise(pid, max(o.opts.Limits.Nice, ownNiceness()))
		case <-ended:
		}
	}
}

// raise gives a worker's process group the usual priority. The disk's and the session's can always be raised; niceness only by
// root or with RLIMIT_NICE. What the system refuses stays low, which delays whoever came to wait, and harms nothing.
func raise(pid, nice int) {
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/autogroup", []byte("0"), 0)
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ioprioGroup, uintptr(pid), 0) // class none: that of the niceness
	_ = unix.Setpriority(unix.PRIO_PGRP, pid, nice)                           // of every thread in the group
}

func ownNiceness() int {
	left, err := unix.Getpriority(unix.PRIO_PROCESS, os.Getpid())
	if err != nil {
		return 0
	}
	return 20 - left // the system call returns that
}

const ioprioGroup = 2 // IOPRIO_WHO_PGRP
