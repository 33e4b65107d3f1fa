package unixsock

import (
	"context"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// EventMissed is the kind of event that tells a subscriber that it was too slow, and did not get the events before.
const EventMissed = "missed"

// maxPendingEvents bounds what waits in a client for its subscriber; the oldest then make room.
const maxPendingEvents = 128

// Subscribe calls fn with events as they happen, one at a time, on this goroutine. It ends without an error when the
// context does, with fn's error when it has one, and with the daemon's or the connection's otherwise: ErrBusy when the
// daemon stops. Who falls far behind misses events, the oldest first, and is told by one of the kind EventMissed; Events
// has them. Other calls on this connection go on meanwhile.
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
	c.readOn()
	defer c.giveUp(envelope.Request, waiting) // the daemon may still serve it
	return c.follow(ctx, waiting, fn)
}

// follow gives what has come before it tells of an end.
func (c *Client) follow(ctx context.Context, waiting *call, fn func(*wire.Event) error) error {
	var end error
	answer, done := waiting.answer, c.done // nil when there is an end
	for ctx.Err() == nil {
		if end != nil && len(waiting.events) == 0 { // none comes after an end
			return end
		}
		select {
		case e := <-waiting.events:
			if err := waiting.give(e, fn); err != nil {
				return err
			}
		case r := <-answer:
			end, answer, done = endOf(r), nil, nil
		case <-done:
			end, answer, done = c.reason, nil, nil
			select {
			case r := <-waiting.answer: // it came just before the end
				end = endOf(r)
			default:
			}
		case <-ctx.Done():
		}
	}
	return nil
}

func (waiting *call) give(e *wire.Event, fn func(*wire.Event) error) error {
	if waiting.missed.Swap(false) {
		missed := &wire.Event{AtMs: time.Now().UnixMilli(), Kind: EventMissed, Text: "this subscriber was too slow"}
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

// take keeps an event for the subscriber; the oldest makes room where there is none.
func (waiting *call) take(event *wire.Event) {
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
