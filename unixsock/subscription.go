package unixsock

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/epcached/epcached/unixsock/wire"
)

// maxPendingEvents bounds what waits for a subscriber that reads slowly; the oldest then make room, and the gap in
// the sequence tells the subscriber.
const maxPendingEvents = 128

// The texts of an event that is sent to subscribers, in bytes: with maxPendingEvents they bound what one can take.
const (
	maxEventText = 1 << 10
	maxEventName = 256
)

// errStopping ends subscriptions when the daemon stops: nobody else would ever end them.
var errStopping = &Error{Class: wire.ErrorClass_BUSY, Text: "the daemon is stopping", Hint: "subscribe again when it is back"}

// subscription sends the events of one Subscribe. Who makes events never waits for who reads them.
type subscription struct {
	connection *connection
	number     uint64

	mu      sync.Mutex
	pending []*wire.Event // oldest first, at most maxPendingEvents
	ended   bool
	wake    chan struct{}
	done    chan struct{}
}

// subscribe runs one Subscribe until it is cancelled. It always ends with an error.
func (c *connection) subscribe(r *request, message *wire.Subscribe) error {
	defer c.subscriptions.Add(-1)
	defer c.user.subscriptions.Add(-1)
	own, all := c.subscriptions.Add(1), c.user.subscriptions.Add(1)
	limits := &c.server.limits
	if own > int64(limits.Subscriptions) || all > int64(limits.SubscriptionsPerUID) {
		return &Error{Class: wire.ErrorClass_BUSY, Text: "too many subscriptions", Hint: "one tells everything: cancel those that are not needed"}
	}
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	stop := context.AfterFunc(c.server.serving, cancel)
	defer stop()

	s := &subscription{connection: c, number: r.number, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go s.run()
	err := c.server.Backend.Subscribe(ctx, c.peer, message, s.put)
	s.end()
	switch {
	case c.server.draining():
		return errStopping
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		return &Error{Class: wire.ErrorClass_CANCELLED, Text: "the daemon ended the subscription"}
	}
	return err
}

// put takes an event, which nobody may change any more. It never waits.
func (s *subscription) put(e *wire.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || e == nil {
		return
	}
	if len(s.pending) == maxPendingEvents {
		s.pending = slices.Delete(s.pending, 0, 1)
	}
	s.pending = append(s.pending, bounded(e))
	s.signal()
}

// bounded copies: the backend may give the same event to all subscribers.
func bounded(e *wire.Event) *wire.Event {
	return &wire.Event{AtMs: e.GetAtMs(), Sequence: e.GetSequence(), Text: short(e.GetText(), maxEventText),
		Kind: short(e.GetKind(), maxEventName), RequestKey: short(e.GetRequestKey(), maxEventName), Build: short(e.GetBuild(), maxEventName),
		Model: short(e.GetModel(), maxEventName), Runtime: short(e.GetRuntime(), maxEventName)}
}

// short is cut, and does not keep the rest in memory either.
func short(text string, n int) string {
	if len(text) <= n {
		return toValid(text)
	}
	return strings.Clone(cut(text, n))
}

func (s *subscription) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// end drops what is not sent, and returns after the last frame: the answer follows.
func (s *subscription) end() {
	s.mu.Lock()
	s.ended, s.pending = true, nil
	s.signal()
	s.mu.Unlock()
	<-s.done
}

func (s *subscription) run() {
	defer close(s.done)
	for {
		e, ended := s.next()
		switch {
		case ended:
			return
		case e == nil:
			<-s.wake
			continue
		}
		envelope := &wire.Envelope{Request: s.number, Body: &wire.Envelope_Event{Event: e}}
		// Until the connection ends, not the request: a frame that is cut off would be the end of the connection.
		if err := s.connection.send(s.connection.ctx, envelope, nil); err != nil {
			var refused *Error
			if !errors.As(err, &refused) {
				s.connection.cancel() // nothing else could be sent either
			}
			return
		}
	}
}

func (s *subscription) next() (e *wire.Event, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.pending) == 0 {
		return nil, s.ended
	}
	e = s.pending[0]
	s.pending = slices.Delete(s.pending, 0, 1)
	return e, s.ended
}
