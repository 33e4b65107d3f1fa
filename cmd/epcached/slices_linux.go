package main

import (
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// shortenSlices sets time slices of 0.1 ms for all threads of the process, which later threads
// inherit. A thread that wakes up preempts a running one with a longer slice; otherwise it waits
// for the end of that slice, 1.4 ms or more, which is ten hits. The share of the processor is
// unchanged. Best effort: only the latency of hits on a busy machine depends on it. Linux before
// 6.12 ignores the call.
func shortenSlices() {
	done := make(map[string]bool)
	for more := true; more; { // threads may start others in the meantime
		more = false
		threads, _ := os.ReadDir("/proc/self/task")
		for _, t := range threads {
			if done[t.Name()] {
				continue
			}
			done[t.Name()], more = true, true
			id, _ := strconv.Atoi(t.Name()) // the kernel's names are numbers
			if attr, err := unix.SchedGetAttr(id, 0); err == nil {
				attr.Runtime = uint64(100 * time.Microsecond)
				_ = unix.SchedSetAttr(id, attr, 0)
			}
		}
	}
}
