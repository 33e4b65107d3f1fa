package main

import (
	"context"

	"github.com/epcached/epcached/cache"
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

// maxRemovals bounds what is listed of a collection: a removal takes less than 2 KiB, and a frame 1 MiB.
const maxRemovals = 256

// Collect makes room, or plans to. There is no budget yet: the caller says how much is to stay.
func (b *backend) Collect(ctx context.Context, p unixsock.Peer, w *wire.Collect, progress func(*wire.Progress)) (*wire.CollectReply, error) {
	if w.ToBytes == nil || w.GetToBytes() < 0 {
		return nil, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: "collect: it is not said how many bytes are to stay"}
	}
	plan, err := b.cache.PlanCollection(ctx, peer(p), w.GetToBytes())
	if err == nil && !w.DryRun {
		err = b.cache.Collect(ctx, plan, func(done, total int64) {
			progress(&wire.Progress{Phase: "collecting", DoneBytes: done, TotalBytes: total})
		})
	}
	if err != nil {
		return nil, wireError(err)
	}
	return collectReply(plan), nil
}

func collectReply(plan *cache.Collection) *wire.CollectReply {
	reply := &wire.CollectReply{FreedBytes: plan.Freed, UsedBytes: plan.Used, BudgetBytes: plan.Goal, ShortBytes: plan.Short,
		PlanSeconds: plan.Took.Seconds(), Considered: plan.Considered}
	for i := range plan.Removals {
		r := &plan.Removals[i]
		if r.Outcome == "removed" || r.Outcome == "planned" {
			reply.Removed++
		}
		if i >= maxRemovals {
			reply.More++
			continue
		}
		one := &wire.Removal{Build: r.Build.BuildKey.String(), ModelName: clip(r.Build.ModelName), Scope: r.Build.Scope, FreesBytes: r.Frees,
			Reason: clip(r.Reason), Outcome: clip(r.Outcome), CompileSeconds: r.Build.CompileSeconds, LastUsedMs: milliseconds(r.Last),
			Models: uint32(max(1, len(r.Build.Members)))}
		if len(r.Build.EPs) > 0 {
			one.Ep = clip(r.Build.EPs[0].Name)
		}
		reply.Removals = append(reply.Removals, one)
	}
	for _, k := range plan.Kept {
		reply.Kept = append(reply.Kept, &wire.Kept{Reason: k.Reason, Builds: k.Builds, Bytes: k.Bytes})
	}
	return reply
}

// clip keeps a name or reason short enough for many of them to fit into a frame.
func clip(text string) string { return valid(text[:min(len(text), 400)]) }

// Usage is not there yet.
func (b *backend) Usage(context.Context, unixsock.Peer, *wire.Usage) (*wire.UsageReply, error) {
	return nil, &unixsock.Error{Class: wire.ErrorClass_VERSION, Text: "this epcached does not tell where its space goes"}
}
