package change

import (
	"context"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/audit"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/unixsock/wire"
)

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
