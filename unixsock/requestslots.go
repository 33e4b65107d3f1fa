package unixsock

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A hit takes a tenth of a millisecond, and to wake another goroutine for it costs a fifth of that.
// So the goroutine that reads an Acquire answers it, too, and reads on afterwards. Where the answer
// takes longer, the overseer passes the reading on to a new goroutine: requests that follow on the
// connection, Cancel among them, wait two of its looks at most. A timer for each answer would be
// less code and costs 5 us of a hit, because starting it wakes the thread that polls the network.

// overseerInterval is the time between two looks of the overseer. It sleeps while nothing is
// answered inline.
const overseerInterval = time.Millisecond

// overseerIdleLooks is how many looks without any inline answer send the overseer to sleep.
const overseerIdleLooks = 100

// requestSlots bounds the requests of one user that run, so that they do not take the processors
// from those of others. A request that takes longer than the overseer's looks mostly waits for
// something else: it goes on, and the next one has its turn.
type requestSlots struct {
	slots []*requestSlot
	free  chan *requestSlot
}

// heldSlot is a request's right to run: the place, and the request's number in it.
type heldSlot struct {
	*requestSlot
	number uint64
}

// requestSlot is a slot in which requests run, one after the other.
type requestSlot struct {
	running  atomic.Uint64 // number of the request; 0: there is none
	last     uint64        // number that was given out; of the request that takes the place
	lastSeen uint64        // running at the overseer's last look; of the overseer alone
	inline   *connection   // whose reader answers; nil: another goroutine does
}

func newRequestSlots(n int) *requestSlots {
	t := &requestSlots{free: make(chan *requestSlot, n)}
	for range n {
		p := &requestSlot{}
		t.slots = append(t.slots, p)
		t.free <- p
	}
	return t
}

// take waits for a turn. There is none if the context ends before.
func (t *requestSlots) take(ctx context.Context, inline *connection) heldSlot {
	var p *requestSlot
	select {
	case p = <-t.free:
	default:
		select {
		case p = <-t.free:
		case <-ctx.Done():
			return heldSlot{}
		}
	}
	p.last++
	p.inline = inline
	own := heldSlot{p, p.last}
	p.running.Store(own.number) // from here on the overseer may pass it on
	return own
}

// end passes the turn on, and reports whether the request still had it.
func (t *requestSlots) end(own heldSlot) bool {
	if own.requestSlot == nil {
		return true
	}
	if !own.running.CompareAndSwap(own.number, 0) {
		return false
	}
	own.inline = nil
	t.free <- own.requestSlot
	return true
}

// passOnSlow takes away the turns that requests had at the last look, and has another goroutine
// read where the reader answers. It reports whether any request runs.
func (t *requestSlots) passOnSlow() (busy bool) {
	for _, p := range t.slots {
		number := p.running.Load()
		if number == 0 || number != p.lastSeen || !p.running.CompareAndSwap(number, 0) {
			p.lastSeen = number
			busy = busy || number != 0
			continue
		}
		if p.inline != nil {
			go p.inline.continueReading()
		}
		p.inline = nil
		t.free <- p
	}
	return busy
}

// overseer looks after the connections with a reader that answers.
type overseer struct {
	start sync.Once
	wake  chan struct{} // holds one token where an answer has begun since it woke last, or more
}

func (o *overseer) wakeUp() {
	select {
	case o.wake <- struct{}{}:
	default:
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
		tick := time.NewTicker(overseerInterval)
		for quiet := 0; quiet < overseerIdleLooks && s.base.Err() == nil; quiet++ {
			<-tick.C
			if s.passOnSlowReaders() {
				quiet = 0
			}
		}
		tick.Stop()
	}
}

// passOnSlowReaders passes on the reading where an answer takes long, and reports whether any is
// under way.
func (s *Server) passOnSlowReaders() (busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.users {
		busy = u.turns.passOnSlow() || busy
	}
	return busy
}
