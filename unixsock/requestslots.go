package unixsock

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A hit takes a tenth of a millisecond, and waking another goroutine for it would add a fifth.
// Therefore the goroutine that reads an Acquire also answers it, and continues reading afterwards.
// If the answer takes longer, the overseer starts another goroutine that reads, so that later
// requests on the connection, such as Cancel, wait for at most two of its checks. A timer for
// each answer would be less code, but takes 5 us of a hit, because starting it wakes the thread
// that polls the network.

// The time between two checks of the overseer: while requests are decided, and while all answers
// come from memory, because so many checks would take more time than such an answer.
const (
	overseerInterval = time.Millisecond
	restingInterval  = 50 * time.Millisecond
)

// After so many checks of one kind without an answer under way, the overseer rests, and after so
// many more it sleeps.
const (
	checksToRest  = 100
	checksToSleep = 20
)

// RestFactor sets how long a slot rests after a request while other users are served too: that many
// times as long as the request ran. So a user with more requests than slots gets a quarter of the
// processors. The daemon then has processor time left for a request of another user, while the
// kernel makes a process that used up its share wait for tens of milliseconds.
const RestFactor = 7

// crowdedFor is how long a user counts as being served after its last connection or request.
const crowdedFor = time.Second

// requestSlots bounds the running requests of one user, so that they leave processor time for other
// users. A request that runs longer than the overseer's interval usually waits for I/O or a job: it
// continues, and the next request gets its slot.
type requestSlots struct {
	slots   []*requestSlot
	free    chan *requestSlot
	waiting atomic.Int64
	crowded *atomic.Bool // Server.crowded
}

// heldSlot is a slot that a request holds, and the request's number in it.
type heldSlot struct {
	*requestSlot
	number uint64
}

// requestSlot is a slot in which requests run, one after the other.
type requestSlot struct {
	running  atomic.Uint64 // number of the running request; 0: none
	last     uint64        // the last number used; guarded by the slot's holder
	lastSeen uint64        // running at the overseer's last check; used by the overseer only
	began    time.Time     // when the request took the slot
	inline   *connection   // its reader answers; nil: another goroutine does
}

func newRequestSlots(n int, crowded *atomic.Bool) *requestSlots {
	t := &requestSlots{free: make(chan *requestSlot, n), crowded: crowded}
	for range n {
		p := &requestSlot{}
		t.slots = append(t.slots, p)
		t.free <- p
	}
	return t
}

// take waits for a slot. The result is empty if the context ends first.
func (t *requestSlots) take(ctx context.Context, inline *connection) heldSlot {
	var p *requestSlot
	select {
	case p = <-t.free:
	default:
		t.waiting.Add(1)
		defer t.waiting.Add(-1)
		select {
		case p = <-t.free:
		case <-ctx.Done():
			return heldSlot{}
		}
	}
	p.last++
	p.began = time.Now()
	p.inline = inline
	own := heldSlot{p, p.last}
	p.running.Store(own.number) // from here on the overseer may take it away
	return own
}

// end releases the slot, and reports whether the request still held it.
func (t *requestSlots) end(own heldSlot) bool {
	if own.requestSlot == nil {
		return true
	}
	if !own.running.CompareAndSwap(own.number, 0) {
		return false
	}
	own.inline = nil
	t.release(own.requestSlot)
	return true
}

// release passes the slot to the next request, after a rest if the user has waiting requests and
// other users are served too.
func (t *requestSlots) release(p *requestSlot) {
	if t.crowded.Load() && t.waiting.Load() > 0 {
		time.AfterFunc(RestFactor*time.Since(p.began), func() { t.free <- p })
		return
	}
	t.free <- p
}

// passOnSlow takes the slots from requests that held them at the last check, and starts another
// reader for a connection whose reader answers. It reports whether any request runs.
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
		t.release(p)
	}
	return busy
}

// overseer supervises connections with a reader that answers. It waits for a ticker and not for
// a timerfd, which made hits beside a flood slower, because Go polls descriptors late while all
// processors are busy.
type overseer struct {
	start sync.Once
	wake  chan struct{} // has a token if an answer began since the overseer last slept
	// has a token if a request is decided while the overseer rests or sleeps
	hasten   chan struct{}
	hurried  atomic.Bool // the overseer does not rest
	deciding atomic.Bool // a request was decided since its last check
}

func put(token chan struct{}) {
	select {
	case token <- struct{}{}:
	default:
	}
}

// wakeUp is called when an answer begins.
func (o *overseer) wakeUp() { put(o.wake) }

// expectSlow is called when a request is decided.
func (o *overseer) expectSlow() {
	o.deciding.Store(true)
	if !o.hurried.Load() {
		put(o.hasten)
	}
}

// oversee runs until the server's connections are ended.
func (s *Server) oversee() {
	for s.base.Err() == nil {
		select {
		case <-s.base.Done():
		case <-s.overseer.wake:
			s.watchAnswers()
			s.crowded.Store(false)
		}
	}
}

// watchAnswers checks the answers under way until there are none.
func (s *Server) watchAnswers() {
	o := &s.overseer
	tick := time.NewTicker(restingInterval)
	defer tick.Stop()
	for quiet := 0; quiet < checksToSleep; quiet++ {
		select {
		case <-s.base.Done():
			return
		case <-tick.C:
			if s.passOnSlowReaders() {
				quiet = 0
			}
			continue
		case <-o.hasten:
		}
		o.hurried.Store(true)
		tick.Reset(overseerInterval)
		for quiet = 0; quiet < checksToRest && s.base.Err() == nil; quiet++ {
			<-tick.C
			if s.passOnSlowReaders() || o.deciding.Swap(false) {
				quiet = 0
			}
		}
		o.hurried.Store(false)
		if o.deciding.Load() { // since the last check
			put(o.hasten)
		}
		tick.Reset(restingInterval)
		quiet = 0
	}
}

// Crowded reports whether several users were served within the last second.
func (s *Server) Crowded() bool { return s.crowded.Load() }

// passOnSlowReaders starts another reader for connections with a slow answer, and reports whether
// any answer is under way.
func (s *Server) passOnSlowReaders() (busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	served, since := 0, time.Now().Add(-crowdedFor).UnixNano()
	for _, u := range s.users {
		if u.used.Load() > since {
			served++
		} else {
			s.forget(u)
		}
	}
	s.crowded.Store(served > 1)
	for _, u := range s.users {
		busy = u.slots.passOnSlow() || busy
	}
	return busy
}
