package main

import (
	"context"
	"time"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Events gives what has happened: the newest, as far as they fit into a frame.
func (b *backend) Events(ctx context.Context, p unixsock.Peer, w *wire.Events) (*wire.EventsReply, error) {
	var since time.Time
	if w.SinceMs > 0 {
		since = time.UnixMilli(w.SinceMs)
	}
	return b.cache.Events(ctx, peer(p), since, int(w.Limit))
}

// Subscribe gives events as they happen.
func (b *backend) Subscribe(ctx context.Context, p unixsock.Peer, _ *wire.Subscribe, send func(*wire.Event) error) error {
	return b.cache.Subscribe(ctx, peer(p), send)
}
