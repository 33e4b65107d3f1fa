package program

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Repeat ends this process by the signal that the program died by, so that whoever waits for it sees the same. It returns
// where there was none.
func (s Status) Repeat() {
	number, ok := s.signal.(syscall.Signal)
	if !ok {
		return
	}
	// The program has left a core where one was wanted.
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return
	}
	// Go's own handlers print goroutines, and do not end by the signal. This is the kernel's struct, all zero: the default.
	var plain [4]uint64
	unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(number), uintptr(unsafe.Pointer(&plain)), 0, 8, 0, 0)
	// Should it not end by it, the exit status does.
	unix.Kill(unix.Getpid(), number)
}
