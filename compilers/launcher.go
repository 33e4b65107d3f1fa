package compilers

import (
	"errors"
	"runtime"
	"sync"
)

var errClosed = errors.New("compiler is closed")

// launcher starts processes from one thread. The kernel kills a worker when the thread that started it ends (Pdeathsig), and Go ends threads as it
// likes; this one ends with the launcher.
type launcher struct {
	calls chan func()
	mu    sync.Mutex // guards closed, and orders close with begin
	done  bool
	jobs  sync.WaitGroup
}

func newLauncher() *launcher {
	l := &launcher{calls: make(chan func())}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		for call := range l.calls {
			call()
		}
	}()
	return l
}

// begin announces a job; close waits until its end is called.
func (l *launcher) begin() (end func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done {
		return nil, errClosed
	}
	l.jobs.Add(1)
	return l.jobs.Done, nil
}

// on runs a function on the thread. Only between begin and end.
func (l *launcher) on(call func() error) error {
	result := make(chan error)
	l.calls <- func() { result <- call() }
	return <-result
}

func (l *launcher) close() {
	l.mu.Lock()
	first := !l.done
	l.done = true
	l.mu.Unlock()
	l.jobs.Wait()
	if first {
		close(l.calls)
	}
}
