package main

import (
	"context"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Pin keeps builds.
func (b *backend) Pin(ctx context.Context, p unixsock.Peer, w *wire.Pin) (*wire.ChangeReply, error) {
	builds, err := b.cache.Pin(ctx, peer(p), w.Entries, w.DryRun)
	if err != nil {
		return nil, wireError(err)
	}
	return &wire.ChangeReply{Builds: buildsReply(builds)}, nil
}

// Unpin lets them go.
func (b *backend) Unpin(ctx context.Context, p unixsock.Peer, w *wire.Unpin) (*wire.ChangeReply, error) {
	builds, err := b.cache.Unpin(ctx, peer(p), w.Entries, w.DryRun)
	if err != nil {
		return nil, wireError(err)
	}
	return &wire.ChangeReply{Builds: buildsReply(builds)}, nil
}

// Collect is not there yet.
func (b *backend) Collect(context.Context, unixsock.Peer, *wire.Collect, func(*wire.Progress)) (*wire.CollectReply, error) {
	return nil, &unixsock.Error{Class: wire.ErrorClass_VERSION, Text: "this epcached has no collector"}
}

// Usage is not there yet.
func (b *backend) Usage(context.Context, unixsock.Peer, *wire.Usage) (*wire.UsageReply, error) {
	return nil, &unixsock.Error{Class: wire.ErrorClass_VERSION, Text: "this epcached does not tell where its space goes"}
}
