package unixsock

import (
	"sync"
	"sync/atomic"
	"time"
)

// A hit takes a tenth of a millisecond, and to wake another goroutine for it costs a fifth of that. So
// the goroutine that reads an Acquire answers it, too, and reads on afterwards. Where the answer takes
// longer, the overseer passes the reading on to a new goroutine: requests that follow on the
// connection, Cancel among them, wait two of its looks at most. A timer for each answer would be
// less code and costs 5 us of a hit, because starting it wakes the thread that polls the network.

// overlookEvery is the time between two looks of the overseer. It sleeps while nothing is answered inline.
const overlookEvery = time.Millisecond

// restAfter is how many looks without any inline answer send the overseer to sleep.
const restAfter = 100

// reading says which goroutine may read a connection: the one that began an inline answer, at first.
type reading struct {
	turn atomic.Uint64 // of the inline answer under way; 0: there is none
	last uint64        // turn that was given out; of the reader alone
	seen uint64        // turn at the overseer's last look; of the overseer alone
}

// begin marks an inline answer as under way.
func (r *reading) begin() (turn uint64) {
	turn = r.last + 1
	r.last = turn
	r.turn.Store(turn) // from here on another goroutine may read, and give out turns
	return turn
}

// end tells whether the goroutine still is the one that reads.
func (r *reading) end(turn uint64) bool { return r.turn.CompareAndSwap(turn, 0) }

// overdue takes the reading away from an answer that was under way at the last look, and reports it.
func (r *reading) overdue() bool {
	turn := r.turn.Load()
	if turn != 0 && turn == r.seen {
		return r.turn.CompareAndSwap(turn, 0)
	}
	r.seen = turn
	return false
}

// overseer looks after the connections whose reader answers.
type overseer struct {
	start sync.Once
	awake atomic.Bool
	wake  chan struct{}
}

func (o *overseer) rouse() {
	if !o.awake.Load() {
		select {
		case o.wake <- struct{}{}:
		default: // it is being woken
		}
	}
}

// oversee runs until the server's connections are ended.
func (s *Server) oversee() {
	for {
		select {
		case <-s.base.Done():
			return
		case <-s.overseer.wake:
		}
		s.overseer.awake.Store(true)
		s.overlookUntilQuiet()
		s.overseer.awake.Store(false)
		// An answer that began just before saw the overseer awake.
		if s.overlook() {
			s.overseer.rouse()
		}
	}
}

func (s *Server) overlookUntilQuiet() {
	tick := time.NewTicker(overlookEvery)
	defer tick.Stop()
	for quiet := 0; quiet < restAfter; quiet++ {
		select {
		case <-s.base.Done():
			return
		case <-tick.C:
		}
		if s.overlook() {
			quiet = 0
		}
	}
}

// overlook passes on the reading where an answer takes long, and reports whether any is under way.
func (s *Server) overlook() (busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.users {
		for c := range u.connections {
			if c.reading.overdue() {
				go c.readOn()
			}
			busy = busy || c.reading.turn.Load() != 0
		}
	}
	return busy
}
