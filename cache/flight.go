package cache

import (
	"context"
	"sync"

	"github.com/epcached/epcached/index"
)

// flights are the compiles under way: one for each build key and scope, however many wait for it.
type flights struct {
	mu   sync.Mutex
	open map[flightKey]*flight // guarded by mu
	work sync.WaitGroup

	began, ended func() // called as each flight begins, with mu held, and after it; may be nil
}

type flightKey struct {
	build index.BuildKey
	scope string
	alone string // not empty: shared with nobody
}

// flightRun does a flight's work. urgent is closed as soon as a request waits for it.
type flightRun func(ctx context.Context, phase func(string), urgent <-chan struct{}) (*compiled, error)

// flight is one compile and those who wait for it.
type flight struct {
	done   chan struct{} // closed when result and err are there
	cancel context.CancelFunc
	urgent chan struct{} // closed under flights.mu; before that the daemon itself is the only one who waits
	result *compiled
	err    error

	mu      sync.Mutex
	phase   string
	waiters map[int]func(string) // guarded by mu; each is told the phases
	next    int
}

// join enters the flight for the key, starting it with run if there is none, and waits for its result. The flight
// goes on as long as anybody waits; when the last one leaves it is cancelled. first says whether this call began it.
func (fs *flights) join(ctx context.Context, key flightKey, phase func(string), prepare func() (flightRun, error)) (result *compiled, first bool, err error) {
	return fs.enter(ctx, key, true, phase, prepare)
}

// joinIdly is join for work that no request waits for. A request that joins later makes it urgent.
func (fs *flights) joinIdly(ctx context.Context, key flightKey, prepare func() (flightRun, error)) (result *compiled, first bool, err error) {
	return fs.enter(ctx, key, false, func(string) {}, prepare)
}

func (fs *flights) enter(ctx context.Context, key flightKey, urgent bool, phase func(string), prepare func() (flightRun, error)) (result *compiled, first bool, err error) {
	fs.mu.Lock()
	f := fs.open[key]
	if f == nil {
		run, err := prepare()
		if err != nil {
			fs.mu.Unlock()
			return nil, true, err
		}
		f = fs.start(key, run, urgent)
		first = true
	}
	if urgent {
		f.hurry()
	}
	leave := f.enter(phase)
	fs.mu.Unlock()
	select {
	case <-f.done:
		leave(nil)
		return f.result, first, f.err
	case <-ctx.Done():
		leave(fs)
		return nil, first, ctx.Err()
	}
}

// start runs the flight on a goroutine of its own. The caller holds fs.mu.
func (fs *flights) start(key flightKey, run flightRun, urgent bool) *flight {
	ctx, cancel := context.WithCancel(context.Background())
	f := &flight{done: make(chan struct{}), cancel: cancel, urgent: make(chan struct{}), waiters: make(map[int]func(string))}
	if urgent {
		f.hurry() // before the work looks
	}
	if fs.open == nil {
		fs.open = make(map[flightKey]*flight)
	}
	fs.open[key] = f
	if fs.began != nil {
		fs.began()
	}
	fs.work.Add(1)
	go func() {
		defer fs.work.Done()
		defer cancel()
		result, err := run(ctx, f.tell, f.urgent)
		fs.mu.Lock()
		if fs.open[key] == f {
			delete(fs.open, key)
		}
		fs.mu.Unlock()
		f.result, f.err = result, err
		close(f.done)
		if fs.ended != nil {
			fs.ended()
		}
	}()
	return f
}

// hurry is called with flights.mu held.
func (f *flight) hurry() {
	select {
	case <-f.urgent:
	default:
		close(f.urgent)
	}
}

// enter adds a waiter. What it returns takes the waiter out again; given the flights, the last to leave cancels.
func (f *flight) enter(phase func(string)) (leave func(*flights)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id := f.next
	f.next++
	f.waiters[id] = phase
	if f.phase != "" {
		phase(f.phase)
	}
	return func(fs *flights) {
		if fs != nil {
			fs.mu.Lock() // nobody may join between the count and the cancel
			defer fs.mu.Unlock()
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.waiters, id)
		if fs == nil || len(f.waiters) > 0 {
			return
		}
		f.cancel()
		for key, open := range fs.open {
			if open == f {
				delete(fs.open, key) // who comes now starts afresh
			}
		}
	}
}

// tell passes a change of phase to everybody who waits.
func (f *flight) tell(phase string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.phase = phase
	for _, w := range f.waiters {
		w(phase)
	}
}

// count is how many compiles are under way.
func (fs *flights) count() int {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return len(fs.open)
}

// busy tells whether a request waits for a compile.
func (fs *flights) busy() bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for _, f := range fs.open {
		select {
		case <-f.urgent:
			return true
		default:
		}
	}
	return false
}

// close cancels what is under way and waits for it to end.
func (fs *flights) close() {
	fs.mu.Lock()
	for _, f := range fs.open {
		f.cancel()
	}
	fs.mu.Unlock()
	fs.work.Wait()
}
