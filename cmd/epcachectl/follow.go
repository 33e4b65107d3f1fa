package main

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// settle is how long after subscribing what has happened is asked for once more: a subscription has no answer that tells when it began.
const settle = 200 * time.Millisecond

// follower prints events as they happen, over restarts of the daemon.
type follower struct {
	app   *app
	since time.Time // of the next question for what has happened
	limit uint32
	last  uint64 // sequence of the last event of this connection
	seen  map[eventIdentity]bool
}

// eventIdentity tells an event from others also when the daemon that numbered it is gone.
type eventIdentity struct {
	at                                             int64
	kind, requestKey, build, model, runtime, words string
}

func identityOf(e *wire.Event) eventIdentity {
	return eventIdentity{e.GetAtMs(), e.GetKind(), e.GetRequestKey(), e.GetBuild(), e.GetModel(), e.GetRuntime(), e.GetText()}
}

// follow goes on until the context ends.
func (a *app) follow(ctx context.Context, since time.Time, limit uint32) error {
	f := &follower{app: a, since: since, limit: limit, seen: make(map[eventIdentity]bool)}
	return a.OverRestarts(ctx, f.listen, func() {
		a.Print.Note("the daemon is back")
		f.last = 0
	})
}

// listen subscribes first and then asks for what has happened, so that nothing falls between the two.
func (f *follower) listen(ctx context.Context, c *unixsock.Client) error {
	ctx, stop := context.WithCancel(ctx)
	live := make(chan *wire.Event)
	done := make(chan struct{})
	var ended error // valid after done is closed
	go func() {
		defer close(done)
		ended = c.Subscribe(ctx, func(e *wire.Event) error {
			select {
			case live <- e:
			case <-ctx.Done():
			}
			return nil
		})
	}()
	err := f.merge(ctx, c, live, done)
	stop()
	<-done
	return errors.Join(err, ended)
}

func (f *follower) merge(ctx context.Context, c *unixsock.Client, live <-chan *wire.Event, done <-chan struct{}) error {
	if err := f.catchUp(ctx, c); err != nil {
		return err
	}
	settled := time.NewTimer(settle)
	defer settled.Stop()
	for {
		var err error
		select {
		case <-done:
			return nil
		case <-settled.C:
			err = f.catchUp(ctx, c)
		case e := <-live:
			err = f.next(ctx, c, e)
		}
		if err != nil {
			return err
		}
	}
}

// catchUp prints what has happened and was not printed.
func (f *follower) catchUp(ctx context.Context, c *unixsock.Client) error {
	reply, err := c.Events(ctx, &wire.Events{SinceMs: sinceMs(f.since), Limit: f.limit})
	if err != nil {
		return err
	}
	f.limit = 0 // of what was there at the start only
	for _, e := range reply.GetEvents() {
		if err := f.print(e); err != nil {
			return err
		}
	}
	return nil
}

// next prints an event that just happened. Where the numbers have a gap, those between are another user's, or were lost on the way: that is looked up.
func (f *follower) next(ctx context.Context, c *unixsock.Client, e *wire.Event) error {
	if e.GetKind() == "missed" || f.last != 0 && e.GetSequence() > f.last+1 {
		if err := f.catchUp(ctx, c); err != nil {
			return err
		}
	}
	if e.GetKind() == "missed" {
		return nil
	}
	return f.print(e)
}

func (f *follower) print(e *wire.Event) error {
	f.last = max(f.last, e.GetSequence())
	id := identityOf(e)
	if f.seen[id] {
		return nil
	}
	f.seen[id] = true
	if at := time.UnixMilli(e.GetAtMs()); at.After(f.since) {
		f.since = at
		f.forget()
	}
	return f.app.printEvent(e)
}

// forget drops what is not asked for again.
func (f *follower) forget() {
	if len(f.seen) < 4096 {
		return
	}
	for id := range f.seen {
		if id.at < f.since.UnixMilli() {
			delete(f.seen, id)
		}
	}
}
