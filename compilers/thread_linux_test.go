package compilers_test

import "runtime"

// endThread makes the Go runtime end a thread: a locked goroutine takes it along.
func endThread() {
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(done)
	}()
	<-done
}
