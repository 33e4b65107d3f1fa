package unixsock

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// maxPendingPhases bounds the phases that wait for a slow client; later phases then replace the
// last one.
const maxPendingPhases = 16

// reporter sends the progress of one request: each change of phase, and otherwise once a second.
// Report never blocks, so that a client that does not read cannot delay a shared compile.
type reporter struct {
	connection *connection
	number     uint64
	arrived    time.Time

	mu      sync.Mutex
	pending []*wire.Progress // one for each unsent phase
	phase   string           // of the last report
	sent    time.Time
	wake    chan struct{} // nil before the first report, because a hit has none
	done    chan struct{}
	ended   bool
}

func (p *reporter) enqueue(m *wire.Progress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended || m == nil {
		return
	}
	m = proto.CloneOf(m)
	m.Phase, m.Detail = cut(m.Phase, 64), cut(m.Detail, maxProgressDetail)
	if m.ElapsedMs == 0 {
		m.ElapsedMs = time.Since(p.arrived).Milliseconds()
	}
	last := len(p.pending) - 1
	if last >= 0 && (p.pending[last].Phase == m.Phase || len(p.pending) == maxPendingPhases) {
		p.pending[last] = m
	} else {
		p.pending = append(p.pending, m)
	}
	if p.wake == nil {
		p.connection.server.overseer.expectSlow()
		p.wake, p.done = make(chan struct{}, 1), make(chan struct{})
		go p.run()
	}
	p.wakeSender()
}

func (p *reporter) wakeSender() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// end sends the remaining changes of phase, and returns after the last frame, so that the answer
// follows it.
func (p *reporter) end() {
	p.mu.Lock()
	p.ended = true
	done := p.done
	if done != nil {
		p.wakeSender()
	}
	p.mu.Unlock()
	if done != nil {
		<-done
	}
}

func (p *reporter) run() {
	defer close(p.done)
	for {
		m, due, ended := p.next()
		switch {
		case m != nil:
			if p.connection.send(p.connection.ctx, envelopeOf(p.number, m), nil) != nil {
				p.connection.cancel() // the answer could not be sent either
			}
		case ended:
			return
		default:
			select {
			case <-p.wake:
			case <-due:
			}
		}
	}
}

// next returns the progress to send now, otherwise when to call it again; nil: after the next
// report.
func (p *reporter) next() (m *wire.Progress, due <-chan time.Time, ended bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.pending) > 0 {
		m = p.pending[0]
		again, wait := m.Phase == p.phase, time.Until(p.sent.Add(progressInterval))
		if again && wait > 0 && !p.ended && len(p.pending) == 1 {
			return nil, time.After(wait), false
		}
		p.pending = slices.Delete(p.pending, 0, 1)
		if again && (wait > 0 || p.ended) {
			continue // skip the progress of an earlier phase
		}
		p.phase, p.sent = m.Phase, time.Now()
		return m, nil, false
	}
	return nil, nil, p.ended
}
