package cache

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// Event is something that happened to an entry, or to the machine.
type Event = index.Event

// The kinds of events. A hit is none: hits are counted.
const (
	EventCompiled      = "compiled"      // a build was made and stored
	EventConverted     = "converted"     // a build was made of its other form: with the context inside the graph, or beside it
	EventUnkept        = "not kept"      // what was compiled was given to those who waited, and could not be kept
	EventFailed        = "failed"        // a compile brought nothing
	EventCancelled     = "cancelled"     // a compile was given up by those who wanted it
	EventClaimed       = "claimed"       // an application compiles a model itself
	EventClaimEnded    = "claim ended"   // without a result
	EventPut           = "put"           // what an application compiled was stored as a build
	EventRetracted     = "retracted"     // a build is gone: removed, collected, or superseded; the index itself tells of it
	EventWithheld      = "withheld"      // a build is not served any more, until it is judged otherwise
	EventDamaged       = "damaged"       // bytes of a build are not what they were
	EventHealed        = "healed"        // a build took the place of one that was damaged
	EventJudged        = "judged"        // how a build suits a runtime, where that changed
	EventRebuild       = "rebuild"       // a build is wanted anew, and queued
	EventRebuilt       = "rebuilt"       // and was made
	EventNotRebuilt    = "not rebuilt"   // and was not: no source at hand, or the compile failed
	EventReport        = "report"        // a client said that a build does not load, and what became of that
	EventProbed        = "probed"        // a runtime was looked at and can be used
	EventUnusable      = "unusable"      // a runtime cannot be used
	EventChanging      = "changing"      // a runtime's files are being written
	EventChanged       = "changed"       // a runtime's libraries, or a driver, are other ones than before
	EventConfiguration = "configuration" // the configuration or the rules were changed, or refused
	EventMissed        = "missed"        // a subscriber fell behind; told to that subscriber alone
)

// happened is the one place through which everything goes that happens: into the journal, and to the subscribers. The
// time and the sequence are filled in. It may write to the disk, so it is not for the path of a hit, and it may not be
// called from within a lock that a subscriber could want. An event that cannot be written is still told.
//
// Of a build: c.happened(eventOf(b, EventJudged, "...")). Of a runtime, or of the machine, which every peer hears of:
// c.happened(Event{Kind: EventProbed, Runtime: rt.name, Text: "..."}). Of a request without a build, heard by the one
// who asked: c.happened(eventFor(peer, key, model, EventFailed, "...")).
func (c *Cache) happened(e Event) {
	e.At = c.now()
	if err := c.index.Note(context.Background(), e); err != nil {
		c.log.Warn("event not kept", "kind", e.Kind, "error", err) // nothing depends on it
	}
}

// eventOf is an event of a build.
func eventOf(b *index.Build, kind, format string, args ...any) Event {
	return Event{Kind: kind, RequestKey: b.RequestKey, BuildKey: b.BuildKey, ModelName: b.ModelName,
		Text:    fmt.Sprintf(format, args...),
		BuildID: b.ID, Scope: b.Scope, By: OwnScope(Peer{UID: b.UID})}
}

// eventFor is an event of a request that has no build; only the peer and administrators hear of it.
func eventFor(p Peer, key index.RequestKey, model, kind, format string, args ...any) Event {
	return Event{Kind: kind, RequestKey: key, ModelName: model, Text: fmt.Sprintf(format, args...),
		Scope: OwnScope(p)}
}

func eventReply(e *Event) *wire.Event {
	return &wire.Event{AtMs: milliseconds(e.At), Kind: e.Kind, RequestKey: keyText(e.RequestKey),
		Build: keyText(e.BuildKey),
		Model: valid(e.ModelName), Text: valid(e.Text), Runtime: valid(e.Runtime),
		Sequence: e.Sequence}
}

// mayHear: everybody of the machine, and of builds whoever may see them, or could while they were there.
func (c *Cache) mayHear(p Peer, e *Event) bool {
	switch {
	case e.RequestKey == index.RequestKey{} || c.Administrator(p) || e.Scope == OwnScope(p):
		return true
	case e.BuildID.IsZero():
		return false
	case e.Scope == "": // written by an earlier epcached
		b, err := c.index.Get(e.BuildID)
		return err == nil && c.maySee(p, &b)
	}
	return c.maySee(p, &index.Build{ID: e.BuildID, Scope: e.Scope})
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
	all := c.index.Events(since)
	out, left := &wire.EventsReply{}, frame(maxReply)
	for i := len(all) - 1; i >= 0 && len(out.Events) < limit; i-- {
		if ctx.Err() != nil {
			return nil, apierr.New(apierr.Cancelled, ctx.Err(), "events")
		}
		if e := &all[i]; c.mayHear(p, e) {
			one := eventReply(c.complete(e))
			if !left.takes(one) {
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
			e := Event{At: c.now(), Kind: EventMissed, Text: "this subscriber was too slow; epcachectl events shows what is kept"}
			if err := fn(eventReply(&e)); err != nil {
				return err
			}
		}
		for i := range events {
			next = events[i].Sequence + 1
			if !c.mayHear(p, &events[i]) {
				continue
			}
			if err := fn(eventReply(&events[i])); err != nil {
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
