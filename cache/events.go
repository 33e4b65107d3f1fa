package cache

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// Event is something that happened to an entry, or to the machine.
type Event = index.Event

// happened is the one place through which everything goes that happens: into the journal, and to the subscribers. The
// time and the sequence are filled in. It may write to the disk, so it is not for the path of a hit, and it may not be
// called from within a lock that a subscriber could want. An event that cannot be written is still told.
//
// Of a build: c.happened(event.Of(b, event.Judged, "...")). Of a runtime, or of the machine, which every peer hears of:
// c.happened(Event{Kind: event.Probed, Runtime: rt.name, Text: "..."}). Of a request without a build, heard by the one
// who asked: c.happened(event.For(event.About{...}, event.Failed, "...")).
func (c *Cache) happened(e Event) {
	e.At = c.now()
	if err := c.index.Journal.Note(context.Background(), e); err != nil {
		c.log.Warn("event not kept", "kind", e.Kind, "error", err) // nothing depends on it
	}
}

// eventsLimit is how many events are given to who does not say, and at most.
const eventsLimit = 10_000

// Events gives what happened since, oldest first, as far as it is kept: at most the newest limit of them, which the
// peer may see. A limit of 0 is the cache's choice.
func (c *Cache) Events(ctx context.Context, p Peer, since time.Time, limit int) (
	*wire.EventsReply, error) {
	if limit <= 0 || limit > eventsLimit {
		limit = eventsLimit
	}
	all := c.index.Journal.Events(since)
	out, left := &wire.EventsReply{}, wire.Left(wire.MaxReply)
	for i := len(all) - 1; i >= 0 && len(out.Events) < limit; i-- {
		if ctx.Err() != nil {
			return nil, apierr.New(apierr.Cancelled, ctx.Err(), "events")
		}
		if e := &all[i]; c.rights.MayHear(p, e) {
			one := event.Reply(c.complete(e))
			if !left.Takes(one) {
				break
			}
			out.Events = append(out.Events, one)
		}
	}
	slices.Reverse(out.Events)
	return out, nil
}

// complete adds what an earlier epcached did not write down.
func (c *Cache) complete(e *Event) *Event {
	if e.Scope == "" && !e.BuildID.IsZero() {
		if b, err := c.index.Get(e.BuildID); err == nil {
			e.BuildKey, e.ModelName, e.Scope = b.BuildKey, b.ModelName, b.Scope
		}
	}
	return e
}

// Subscribe calls fn with each event that the peer may see, one at a time, until the context ends, which is no
// error, or fn fails. A subscriber that falls far behind misses events: it is told so by an event of its own, of the
// kind "missed" and without a sequence.
func (c *Cache) Subscribe(ctx context.Context, p Peer, fn func(*wire.Event) error) error {
	return c.subscribe(ctx, p, c.stream.end(), fn)
}

// subscribe begins with the event that has this sequence.
func (c *Cache) subscribe(ctx context.Context, p Peer, next uint64,
	fn func(*wire.Event) error) error {
	for {
		events, missed, more := c.stream.from(next)
		if missed > 0 {
			next += missed
			e := Event{At: c.now(), Kind: event.Missed, Text: "this subscriber was too slow; epcachectl events shows what is kept"}
			if err := fn(event.Reply(&e)); err != nil {
				return err
			}
		}
		for i := range events {
			next = events[i].Sequence + 1
			if !c.rights.MayHear(p, &events[i]) {
				continue
			}
			if err := fn(event.Reply(&events[i])); err != nil {
				return err
			}
		}
		if len(events) > 0 && ctx.Err() == nil {
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-more:
		}
	}
}

// stream holds the latest events for those who subscribed. Their sequences have no gap.
type stream struct {
	mu     sync.Mutex
	latest []Event       // oldest first; guarded by mu
	more   chan struct{} // closed, and made anew, when there is another event; guarded by mu
}

// maxBehind is how many events a subscriber may fall behind.
const maxBehind = 1024

// add takes an event; the index calls it, in order.
func (s *stream) add(e index.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.latest) >= 2*maxBehind {
		s.latest = slices.Clone(s.latest[maxBehind:]) // now and then, not for each event
	}
	s.latest = append(s.latest, e)
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
}

// end is the sequence of the next event.
func (s *stream) end() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.latest) == 0 {
		return 1
	}
	return s.latest[len(s.latest)-1].Sequence + 1
}

// from gives the events from the sequence on, how many of them are gone already, and what tells that there are more.
func (s *stream) from(next uint64) (events []Event, missed uint64, more <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.more == nil {
		s.more = make(chan struct{})
	}
	kept := s.latest[max(0, len(s.latest)-maxBehind):]
	if len(kept) == 0 {
		return nil, 0, s.more
	}
	if first := kept[0].Sequence; next < first {
		missed, next = first-next, first
	}
	return slices.Clone(kept[min(next-kept[0].Sequence, uint64(len(kept))):]), missed, s.more
}
