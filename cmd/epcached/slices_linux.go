package main

import (
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// shortenSlices gives all threads of the process time slices of 0.1 ms, and with them those that
// they start. A thread that wakes up gets the processor at once if its slice is shorter than that
// of the running one, and otherwise waits for the end of that, 1.4 ms and more, which is ten hits.
// It gets no more processor time than before. A failure is ignored, because only the time of hits
// on a busy machine depends on it. Linux before 6.12 ignores the call.
func shortenSlices() {
	done := make(map[string]bool)
	for more := true; more; { // a thread may start another one meanwhile
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
