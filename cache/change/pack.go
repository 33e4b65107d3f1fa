package change

import (
	"context"
	"errors"
	"strings"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/audit"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// Pack packs the builds that the names mean, or all that the peer may change, where that saves
// bytes and no client uses them. With dryRun it looks for what they share, and reports what packing
// would free. progress, which may be nil, counts builds.
func (c *Changes) Pack(ctx context.Context, p request.Peer, names []string, all, dryRun bool,
	progress func(done, total int64)) (*wire.PackReply, error) {
	ids, err := c.toPack(ctx, p, names, all)
	if err != nil {
		return nil, err
	}
	return c.eachPacked(ctx, ids, true, progress, c.store.Packer().PackByHand(ctx, dryRun))
}

// packLater returns what packing would free of a build that stays whole because a client uses it,
// or may use it; else 0.
func (c *Changes) packLater(b *index.Build, outcome string) int64 {
	if !strings.HasPrefix(outcome, "kept: ") || c.store.Busy(b) == "" {
		return 0
	}
	return c.store.Packer().PackSaving(b.ID)
}

// Unpack makes such builds whole again, durably, and removes their recipes. They may be packed
// again when they are cold.
func (c *Changes) Unpack(ctx context.Context, p request.Peer, names []string, all, dryRun bool,
	progress func(done, total int64)) (*wire.PackReply, error) {
	ids, err := c.toPack(ctx, p, names, all)
	if err != nil {
		return nil, err
	}
	return c.eachPacked(ctx, ids, false, progress, c.store.Packer().UnpackByHand(ctx, dryRun))
}

// eachPacked calls do with each build, and reports what became of it.
func (c *Changes) eachPacked(
	ctx context.Context, ids []index.BuildID, packs bool, progress func(done, total int64),
	do func(*index.Build) (string, int64, error),
) (*wire.PackReply, error) {
	out, done := &wire.PackReply{}, int64(0)
	err := c.eachOf(ctx, ids, func(b *index.Build) error {
		if progress != nil {
			progress(done, int64(len(ids)))
		}
		done++
		outcome, frees, err := do(b)
		switch {
		case ctx.Err() != nil:
			return apierr.New(apierr.Cancelled, ctx.Err(), "pack")
		case err != nil && c.isGone(b.ID): // collected or removed meanwhile
			outcome, frees = "kept: "+store.KeptGone, 0
		case packing.Lost(err):
			outcome = "kept: " + c.store.WithholdDamaged(ctx, b, err)
		case err != nil:
			return request.StoreError(err, b.ModelName)
		}
		later := int64(0)
		if err == nil && packs {
			later = c.packLater(b, outcome)
		}
		out.FreedBytes += frees
		out.LaterBytes += later
		if outcome == store.PackedNow || outcome == store.UnpackedNow {
			out.Changed++
		}
		if len(out.Builds) == maxChanged { // each takes less than 2 KiB
			out.More++
			return nil
		}
		out.Builds = append(out.Builds, &wire.PackedBuild{Build: b.BuildKey.String(),
			ModelName: wire.Clip(b.ModelName), Ep: wire.Clip(query.FirstEP(b)), Scope: b.Scope,
			Outcome: wire.Clip(outcome), FreesBytes: frees, LaterBytes: later})
		return nil
	})
	return out, err
}

// toPack lists the builds that Pack or Unpack is for.
func (c *Changes) toPack(ctx context.Context, p request.Peer, names []string, all bool) (
	[]index.BuildID, error) {
	switch {
	case all && len(names) > 0:
		return nil, apierr.New(apierr.BadRequest, nil, "pack: all builds, or those that are named")
	case !all && len(names) == 0:
		return nil, apierr.New(apierr.BadRequest, nil, "pack: no build is named")
	}
	return c.toRemove(ctx, p, names, all)
}

func (c *Changes) isGone(id index.BuildID) bool {
	_, err := c.index.Get(id)
	return errors.Is(err, index.ErrNotFound)
}

// PlanCollection plans to bring the builds that the peer may collect within the configured bounds,
// or within the goal: all builds for administrators, else the peer's own. progress, which may be
// nil, is told how far the survey of the store is.
func (c *Changes) PlanCollection(ctx context.Context, p request.Peer, goal store.Goal,
	progress func(*wire.Progress)) (*store.Collection, error) {
	goal.Told = wire.FarThrough(progress, "reading")
	return c.store.Collector().Plan(ctx, store.Owner{UID: p.UID, All: c.rights.Administrator(p)}, goal)
}

// CollectReply reports what a plan does, or what became of it.
func (c *Changes) CollectReply(plan *store.Collection) *wire.CollectReply {
	reply := &wire.CollectReply{FreedBytes: plan.Freed, UsedBytes: plan.Used,
		BudgetBytes: max(plan.Goal, 0), ShortBytes: plan.Short,
		PlanSeconds: plan.Took.Seconds(), Considered: plan.Considered,
		Removed: plan.Done(evict.Evict), Packed: plan.Done(evict.PackBuild),
		Copies: plan.Done(evict.DropCopy), More: uint32(len(plan.Steps) - len(plan.Told))}
	for i, b := range plan.Told {
		r := &plan.Steps[i]
		reply.Steps = append(reply.Steps, &wire.CollectStep{Build: b.BuildKey.String(),
			ModelName: wire.Clip(b.ModelName), Ep: wire.Clip(query.FirstEP(b)),
			Scope: b.Scope, FreesBytes: r.Frees,
			Reason: wire.Clip(r.Reason()), Outcome: wire.Clip(r.Outcome), CompileSeconds: b.CompileSeconds,
			LastUsedMs: wire.Milliseconds(r.Last), Models: uint32(max(1, len(b.Members))),
			Action: r.Action.String()})
	}
	for _, k := range plan.Kept {
		kept := &wire.Kept{Reason: k.Reason, Builds: k.Builds, Bytes: k.Bytes}
		for _, id := range k.First {
			if b, err := c.index.Get(id); err == nil { // else it has gone
				kept.Keys = append(kept.Keys, b.BuildKey.String())
			}
		}
		reply.Kept = append(reply.Kept, kept)
	}
	return reply
}

// Check compares the store with what it should be: its files, or with w.Space the account of the
// disk. progress may be nil.
func (c *Changes) Check(ctx context.Context, p request.Peer, w *wire.Check,
	progress func(*wire.Progress)) (*wire.CheckReply, error) {
	if !c.rights.Administrator(p) {
		return nil, apierr.New(apierr.NotAllowed, nil, "checking the store is for administrators")
	}
	if w.Space {
		return audit.Space(ctx, c.store, progress)
	}
	return audit.Check(ctx, c.store, w, progress)
}
