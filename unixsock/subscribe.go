package unixsock

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// EventMissed is the kind of the event that tells a subscriber that it was too slow and missed
// earlier events.
const EventMissed = "missed"

// maxPendingEvents bounds the events that wait in a client for its subscriber; beyond it the oldest
// are dropped.
const maxPendingEvents = 128

// Subscribe calls fn with events as they happen, one at a time, on this goroutine. It returns nil
// when the context ends, otherwise fn's error, the daemon's (ErrBusy when it stops) or the
// connection's. A subscriber that falls far behind misses events, the oldest first, and gets one of
// the kind EventMissed instead; see Events. Other calls may use this connection at the same time.
func (c *Client) Subscribe(ctx context.Context, fn func(*wire.Event) error) error {
	waiting := newCall(false)
	waiting.events = make(chan *wire.Event, maxPendingEvents)
	envelope := envelopeOf(0, &wire.Subscribe{})
	if err := c.start(ctx, envelope, nil, waiting); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	c.continueReading()
	defer c.giveUp(envelope.Request, waiting) // the daemon may still serve it
	return c.follow(ctx, waiting, fn)
}

// follow delivers all pending events before it reports an end.
func (c *Client) follow(ctx context.Context, waiting *call, fn func(*wire.Event) error) error {
	var end error
	answer, done := waiting.answer, c.done // set to nil at the end
	for ctx.Err() == nil {
		if end != nil && len(waiting.events) == 0 { // no event follows the end
			return end
		}
		select {
		case e := <-waiting.events:
			if err := waiting.deliverEvents(e, fn); err != nil {
				return err
			}
		case r := <-answer:
			end, answer, done = endOf(r), nil, nil
		case <-done:
			end, answer, done = c.reason, nil, nil
			select {
			case r := <-waiting.answer: // it arrived just before the end
				end = endOf(r)
			default:
			}
		case <-ctx.Done():
		}
	}
	return nil
}

func (waiting *call) deliverEvents(e *wire.Event, fn func(*wire.Event) error) error {
	if waiting.missed.Swap(false) {
		missed := &wire.Event{AtMs: time.Now().UnixMilli(), Kind: EventMissed,
			Text: "this subscriber was too slow"}
		if err := fn(missed); err != nil {
			return err
		}
	}
	return fn(e)
}

func endOf(r reply) error {
	closeFiles(r.files)
	if failure := r.envelope.GetError(); failure != nil {
		return fromWire(failure)
	}
	return unexpected(r.envelope)
}

// enqueueEvent queues an event for the subscriber. If the queue is full it drops the oldest.
func (waiting *call) enqueueEvent(event *wire.Event) {
	for waiting.events != nil {
		select {
		case waiting.events <- event:
			return
		default:
		}
		select {
		case <-waiting.events:
			waiting.missed.Store(true)
		default:
		}
	}
}

// The texts of an event that is sent to subscribers, in bytes: it must fit into a frame.
const (
	maxEventText = 16 << 10
	maxEventName = 1 << 10
)

// errStopping ends subscriptions when the daemon stops, because they have no end of their own.
var errStopping = &Error{Class: wire.ErrorClass_BUSY, Text: "the daemon is stopping",
	Hint: "subscribe again when it is back"}

var errEnded = errors.New("the subscription has ended")

// subscribe runs one Subscribe until it is cancelled. It always ends with an error.
func (c *connection) subscribe(r *request, message *wire.Subscribe) error {
	defer c.subscriptions.Add(-1)
	defer c.user.subscriptions.Add(-1)
	own, all := c.subscriptions.Add(1), c.user.subscriptions.Add(1)
	limits := &c.server.limits
	if own > int64(limits.Subscriptions) || all > int64(limits.SubscriptionsPerUID) {
		return &Error{Class: wire.ErrorClass_BUSY, Text: "too many subscriptions", Hint: "one " +
			"subscription gets all events: cancel the others"}
	}
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	stop := context.AfterFunc(c.server.serving, cancel)
	defer stop()

	// Nothing is kept here: the backend keeps the events that a subscriber has not read, for all of
	// them together.
	var mu sync.Mutex // held while sending
	ended := false
	err := c.server.Backend.Subscribe(ctx, c.peer, message, func(e *wire.Event) error {
		mu.Lock()
		defer mu.Unlock()
		if ended {
			return errEnded
		}
		return c.sendEvent(r.number, e)
	})
	mu.Lock() // after the last frame: the answer follows
	ended = true
	mu.Unlock()
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

// sendEvent waits until the event is in the socket. A client that does not read ends its connection
// by that.
func (c *connection) sendEvent(number uint64, e *wire.Event) error {
	// Until the connection ends, not the request: a frame that is cut off would be the end of the
	// connection.
	err := c.send(c.ctx, envelopeOf(number, boundedEvent(e)), nil)
	if _, refused := errors.AsType[*Error](err); err != nil && !refused {
		c.cancel() // nothing else could be sent either
	}
	return err
}

// boundedEvent copies: the backend may give the same event to all subscribers.
func boundedEvent(e *wire.Event) *wire.Event {
	return &wire.Event{AtMs: e.GetAtMs(), Sequence: e.GetSequence(),
		Text: cut(e.GetText(), maxEventText), Kind: cut(e.GetKind(), maxEventName),
		RequestKey: cut(e.GetRequestKey(), maxEventName), Build: cut(e.GetBuild(), maxEventName),
		Model: cut(e.GetModel(), maxEventName), Runtime: cut(e.GetRuntime(), maxEventName)}
}
