package cas

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// lockThread gives the calling goroutine a thread of its own until unlock.
func lockThread() (id int, unlock func()) {
	runtime.LockOSThread()
	return unix.Gettid(), runtime.UnlockOSThread
}

// thread is that of the calling goroutine, at this moment.
func thread() int { return unix.Gettid() }

// threadTime is the processor time of a thread of this process; 0 if the kernel
// does not tell.
func threadTime(id int) time.Duration {
	const perThread, scheduled = 4, 2 // of the kernel's MAKE_THREAD_CPUCLOCK
	var t unix.Timespec
	if unix.ClockGettime(int32(^id)<<3|perThread|scheduled, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}
