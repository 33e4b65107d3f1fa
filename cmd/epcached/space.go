package main

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Pin keeps builds.
func (b *backend) Pin(ctx context.Context, p unixsock.Peer, w *wire.Pin) (*wire.ChangeReply, error) {
	return b.cache.Pin(ctx, peer(p), w.Entries, w.DryRun)
}

// Unpin lets them go.
func (b *backend) Unpin(ctx context.Context, p unixsock.Peer, w *wire.Unpin) (*wire.ChangeReply, error) {
	return b.cache.Unpin(ctx, peer(p), w.Entries, w.DryRun)
}

// Collect makes room, or plans to.
func (b *backend) Collect(ctx context.Context, p unixsock.Peer, w *wire.Collect, progress func(*wire.Progress)) (*wire.CollectReply, error) {
	if w.ToBytes != nil && w.GetToBytes() < 0 {
		return nil, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: fmt.Sprintf("collect: to_bytes %d is less than nothing", w.GetToBytes())}
	}
	plan, err := b.cache.PlanCollection(ctx, peer(p), cache.Goal{Bytes: w.ToBytes, Progress: howFar(progress)})
	if err == nil && !w.DryRun {
		err = b.cache.Collect(ctx, plan, func(done, total int64) {
			progress(&wire.Progress{Phase: "collecting", DoneBytes: done, TotalBytes: total})
		})
	}
	if err != nil {
		return nil, err
	}
	return b.cache.CollectReply(plan), nil
}

// Pack packs builds, or makes them whole again.
func (b *backend) Pack(ctx context.Context, p unixsock.Peer, w *wire.Pack, progress func(*wire.Progress)) (*wire.PackReply, error) {
	do, phase := b.cache.Pack, "packing"
	if w.Unpack {
		do, phase = b.cache.Unpack, "unpacking"
	}
	return do(ctx, peer(p), w.Entries, w.All, w.DryRun, func(done, total int64) {
		progress(&wire.Progress{Phase: phase, Detail: fmt.Sprintf("build %d of %d", done+1, total), Done: uint64(done), Total: uint64(total)})
	})
}

// Usage tells where the space goes.
func (b *backend) Usage(ctx context.Context, p unixsock.Peer, w *wire.Usage, progress func(*wire.Progress)) (*wire.UsageReply, error) {
	return b.cache.Usage(ctx, peer(p), w, howFar(progress))
}

// Layout tells where the bytes of builds' files stand.
func (b *backend) Layout(ctx context.Context, p unixsock.Peer, w *wire.Layout) (*wire.LayoutReply, error) {
	l, err := b.cache.Layout(ctx, peer(p), w.Entries, int(w.Most), w.Tensors)
	if err != nil {
		return nil, err
	}
	return l.Reply(), nil
}
