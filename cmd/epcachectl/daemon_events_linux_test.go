package main

import (
	"context"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (b *standIn) Report(context.Context, unixsock.Peer, *wire.Report) (*wire.ReportReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.ReportReply{Decision: "sound"}, b.err
}

func (b *standIn) Why(_ context.Context, _ unixsock.Peer, w *wire.Why) (*wire.Explanation, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changes = append(b.changes, "why "+w.GetEntry())
	if b.explain != nil {
		return b.explain, b.err
	}
	return &wire.Explanation{Decision: "current"}, b.err
}

func (b *standIn) Events(_ context.Context, _ unixsock.Peer, e *wire.Events) (*wire.EventsReply,
	error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asks++
	reply := &wire.EventsReply{}
	for _, one := range b.past {
		if one.GetAtMs() >= e.GetSinceMs() {
			reply.Events = append(reply.Events, one)
		}
	}
	if n := len(reply.Events) - int(e.GetLimit()); e.GetLimit() > 0 && n > 0 {
		reply.Events = reply.Events[n:]
	}
	return reply, b.err
}

func (b *standIn) Doctor(context.Context, unixsock.Peer, *wire.Doctor) (*wire.DoctorReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.DoctorReply{Advice: b.advice}, b.err
}

func (b *standIn) Subscribe(ctx context.Context, _ unixsock.Peer, _ *wire.Subscribe,
	send func(*wire.Event) error) error {
	events := make(chan *wire.Event, 64)
	b.set(func() {
		if b.subscribers == nil {
			b.subscribers = make(map[chan *wire.Event]bool)
		}
		b.subscribers[events] = true
	})
	defer b.set(func() { delete(b.subscribers, events) })
	for {
		select {
		case e := <-events:
			send(e)
		case <-ctx.Done():
			return nil
		}
	}
}

// happen makes an event, in the past and for subscribers.
func (b *standIn) happen(e *wire.Event) {
	b.set(func() {
		b.past = append(b.past, e)
		for events := range b.subscribers {
			if !b.lossy {
				events <- e
			}
		}
	})
}

// listened waits until a subscriber listens and has asked what was before.
func (b *standIn) listened(asks int) {
	require.Eventually(b.t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.subscribers) == 1 && b.asks >= asks
	}, 2*time.Minute, time.Millisecond)
}
