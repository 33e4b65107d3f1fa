package main

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Events gives what has happened: the newest, as far as they fit into a frame.
func (b *backend) Events(ctx context.Context, p unixsock.Peer, w *wire.Events) (*wire.EventsReply, error) {
	var since time.Time
	if w.SinceMs > 0 {
		since = time.UnixMilli(w.SinceMs)
	}
	events, err := b.cache.Events(ctx, peer(p), since, int(w.Limit))
	if err != nil {
		return nil, err
	}
	return eventsReply(events), nil
}

// eventsReply keeps the newest that fit.
func eventsReply(events []cache.Event) *wire.EventsReply {
	reply, size := &wire.EventsReply{}, 0
	for i := range slices.Backward(events) {
		e := eventReply(&events[i])
		if size += proto.Size(e) + 8; size > maxReply { // 8: its tag and length, at most
			break
		}
		reply.Events = append(reply.Events, e)
	}
	slices.Reverse(reply.Events)
	return reply
}

// Subscribe gives events as they happen.
func (b *backend) Subscribe(ctx context.Context, p unixsock.Peer, _ *wire.Subscribe, send func(*wire.Event) error) error {
	err := b.cache.Subscribe(ctx, peer(p), func(e cache.Event) error { return send(eventReply(&e)) })
	if err != nil {
		return wireError(err)
	}
	return nil
}

func eventReply(e *cache.Event) *wire.Event {
	return &wire.Event{AtMs: milliseconds(e.At), Kind: e.Kind, RequestKey: keyText(e.RequestKey), Build: keyText(e.Build),
		Model: valid(e.Model), Text: valid(e.Text), Runtime: valid(e.Runtime), Sequence: e.Sequence}
}

// milliseconds is Unix time, 0 for no time.
func milliseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
