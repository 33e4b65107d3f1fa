package main

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// maxPacked bounds what is listed: a build takes less than 2 KiB, and a frame 1 MiB.
const maxPacked = 256

// Pack packs builds, or makes them whole again.
func (b *backend) Pack(ctx context.Context, p unixsock.Peer, w *wire.Pack, progress func(*wire.Progress)) (*wire.PackReply, error) {
	do, phase := b.cache.Pack, "packing"
	if w.Unpack {
		do, phase = b.cache.Unpack, "unpacking"
	}
	results, err := do(ctx, peer(p), w.Entries, w.All, w.DryRun, func(done, total int64) {
		progress(&wire.Progress{Phase: phase, Detail: fmt.Sprintf("build %d of %d", done+1, total), Done: uint64(done), Total: uint64(total)})
	})
	if err != nil {
		return nil, err
	}
	reply := &wire.PackReply{}
	for i := range results {
		r := &results[i]
		reply.FreedBytes += r.Frees
		reply.LaterBytes += r.Later
		if r.Outcome == cache.PackedNow || r.Outcome == cache.UnpackedNow {
			reply.Changed++
		}
		if i >= maxPacked {
			reply.More++
			continue
		}
		one := &wire.PackedBuild{Build: r.Build.BuildKey.String(), ModelName: clip(r.Build.ModelName), Scope: r.Build.Scope, Outcome: clip(r.Outcome), FreesBytes: r.Frees, LaterBytes: r.Later}
		if len(r.Build.EPs) > 0 {
			one.Ep = clip(r.Build.EPs[0].Name)
		}
		reply.Builds = append(reply.Builds, one)
	}
	return reply, nil
}
