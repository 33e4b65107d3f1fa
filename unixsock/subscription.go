package unixsock

import (
	"context"
	"errors"
	"sync"

	"github.com/epcached/epcached/unixsock/wire"
)

// The texts of an event that is sent to subscribers, in bytes: it must fit into a frame.
const (
	maxEventText = 16 << 10
	maxEventName = 1 << 10
)

// errStopping ends subscriptions when the daemon stops: nobody else would ever end them.
var errStopping = &Error{Class: wire.ErrorClass_BUSY, Text: "the daemon is stopping", Hint: "subscribe again when it is back"}

var errEnded = errors.New("the subscription has ended")

// subscription sends the events of one Subscribe. Nothing is kept here: who makes events keeps those that a
// subscriber has not read, for all subscribers together.
type subscription struct {
	connection *connection
	number     uint64

	mu    sync.Mutex // held while sending
	ended bool
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

	s := &subscription{connection: c, number: r.number}
	err := c.server.Backend.Subscribe(ctx, c.peer, message, s.send)
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

// send waits until the event is in the socket. A client that does not read ends its connection by that.
func (s *subscription) send(e *wire.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return errEnded
	}
	c := s.connection
	// Until the connection ends, not the request: a frame that is cut off would be the end of the connection.
	err := c.send(c.ctx, envelopeOf(s.number, bounded(e)), nil)
	if _, is := errors.AsType[*Error](err); err != nil && !is {
		c.cancel() // nothing else could be sent either
	}
	return err
}

// bounded copies: the backend may give the same event to all subscribers.
func bounded(e *wire.Event) *wire.Event {
	return &wire.Event{AtMs: e.GetAtMs(), Sequence: e.GetSequence(), Text: cut(e.GetText(), maxEventText),
		Kind: cut(e.GetKind(), maxEventName), RequestKey: cut(e.GetRequestKey(), maxEventName), Build: cut(e.GetBuild(), maxEventName),
		Model: cut(e.GetModel(), maxEventName), Runtime: cut(e.GetRuntime(), maxEventName)}
}

// end returns after the last frame: the answer follows.
func (s *subscription) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}
