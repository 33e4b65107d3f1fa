package query

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

const eventsLimit = 10_000

// Events returns the events since a time that the peer may see, oldest first, as far as they are
// kept: at most the newest limit of them. A limit of 0 is the largest there is.
func (q *Queries) Events(ctx context.Context, p rights.Peer, since time.Time, limit int) (
	*wire.EventsReply, error) {
	if limit <= 0 || limit > eventsLimit {
		limit = eventsLimit
	}
	all := q.index.Journal.Events(since)
	out, left := &wire.EventsReply{}, wire.Left(wire.MaxReply)
	for i := len(all) - 1; i >= 0 && len(out.Events) < limit; i-- {
		if ctx.Err() != nil {
			return nil, apierr.New(apierr.Cancelled, ctx.Err(), "events")
		}
		if e := &all[i]; q.rights.MayHear(p, e) {
			one := event.Reply(q.complete(e))
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
func (q *Queries) complete(e *index.Event) *index.Event {
	if e.Scope == "" && !e.BuildID.IsZero() {
		if b, err := q.index.Get(e.BuildID); err == nil {
			e.BuildKey, e.ModelName, e.Scope = b.BuildKey, b.ModelName, b.Scope
		}
	}
	return e
}

// Subscribe calls fn with each event that the peer may see, one at a time, until the context ends,
// which is no error, or fn fails. A subscriber that falls far behind misses events: it receives an
// event of the kind "missed" then, without a sequence.
func (q *Queries) Subscribe(ctx context.Context, p rights.Peer, fn func(*wire.Event) error) error {
	return q.SubscribeFrom(ctx, p, q.options.Stream.End(), fn)
}

// SubscribeFrom is Subscribe that begins with the event of this sequence.
func (q *Queries) SubscribeFrom(ctx context.Context, p rights.Peer, next uint64,
	fn func(*wire.Event) error) error {
	for {
		events, missed, more := q.options.Stream.from(next)
		if missed > 0 {
			next += missed
			e := index.Event{At: q.options.Now(), Kind: event.Missed, Text: "this subscriber was too slow; epcachectl events shows what is kept"}
			if err := fn(event.Reply(&e)); err != nil {
				return err
			}
		}
		for i := range events {
			next = events[i].Sequence + 1
			if !q.rights.MayHear(p, &events[i]) {
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

// Stream holds the latest events for subscribers. Their sequences have no gap.
type Stream struct {
	mu     sync.Mutex
	latest []index.Event // oldest first; guarded by mu
	more   chan struct{} // closed and replaced with each event; guarded by mu
}

// MaxBehind is how many events a subscriber may fall behind.
const MaxBehind = 1024

// Add takes an event; the index calls it, in order.
func (s *Stream) Add(e index.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.latest) >= 2*MaxBehind {
		s.latest = slices.Clone(s.latest[MaxBehind:]) // now and then, not for each event
	}
	s.latest = append(s.latest, e)
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
}

// End returns the sequence of the next event.
func (s *Stream) End() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.latest) == 0 {
		return 1
	}
	return s.latest[len(s.latest)-1].Sequence + 1
}

// from returns the events from next on, how many were dropped, and what is closed with a new one.
func (s *Stream) from(next uint64) (events []index.Event, missed uint64, more <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.more == nil {
		s.more = make(chan struct{})
	}
	kept := s.latest[max(0, len(s.latest)-MaxBehind):]
	if len(kept) == 0 {
		return nil, 0, s.more
	}
	if first := kept[0].Sequence; next < first {
		missed, next = first-next, first
	}
	return slices.Clone(kept[min(next-kept[0].Sequence, uint64(len(kept))):]), missed, s.more
}

const maxHistory = 200

// WithHistory adds what the peer may see of the entry's events and fits, and returns the answer.
func (q *Queries) WithHistory(
	p rights.Peer, key index.RequestKey, out *wire.Explanation,
) *wire.Explanation {
	all := q.index.Journal.History(key)
	out.Reason = wire.Valid(out.Reason)
	for i := len(all) - 1; i >= 0 && len(out.History) < maxHistory; i-- {
		if e := &all[i]; q.rights.MayHear(p, e) {
			out.History = append(out.History, event.Reply(q.complete(e)))
		}
	}
	slices.Reverse(out.History)
	shorten(out, wire.MaxReply-len(out.Record)-len(out.Reason)) // which the answer to a request has once more
	return out
}

// shorten drops first what is farthest from the decision: old history, then far neighbours.
func shorten(e *wire.Explanation, limit int) {
	for proto.Size(e) > limit {
		switch {
		case len(e.History) > 0:
			e.History = e.History[(len(e.History)+1)/2:]
		case len(e.Neighbours) > 0:
			e.Neighbours = e.Neighbours[:len(e.Neighbours)/2]
		case len(e.Candidates) > 0:
			e.Candidates = e.Candidates[:len(e.Candidates)/2]
		case e.Record != "":
			e.Record = ""
		default:
			return
		}
	}
}
