// Package change carries out the verbs that change stored builds: withhold, remove, pin, pack,
// unpack, evict and check. Users may change their own builds, administrators all. Package
// store/evict decides which builds an eviction removes.
package change

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/audit"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// Changes changes builds of one store. Its methods may be called by several goroutines.
type Changes struct {
	store  *store.Store
	index  *index.Index
	query  *query.Queries
	rights *rights.Rights
	now    func() time.Time
}

func New(s *store.Store, q *query.Queries, r *rights.Rights, now func() time.Time) *Changes {
	return &Changes{store: s, index: s.Index(), query: q, rights: r, now: now}
}

// changeLog reports the builds that were changed, or would be, up to maxChanged.
type changeLog struct {
	query *query.Queries
	peer  request.Peer
	reply *wire.ChangeReply
	space wire.SpaceLeft
}

// maxChanged is how many changed builds an answer lists.
const maxChanged = 256

func (c *Changes) newChangeLog(p request.Peer) *changeLog {
	return &changeLog{c.query, p, &wire.ChangeReply{}, wire.MaxReply}
}

// noteKept records a changed build that is still stored.
func (ch *changeLog) noteKept(b *index.Build) error {
	return ch.add(func() (*wire.Build, error) { return ch.query.Listed(ch.peer, b) })
}

func (ch *changeLog) noteRemoved(d *store.Removal) {
	// the function returns no error
	_ = ch.add(func() (*wire.Build, error) {
		b := ch.query.Listing(d.Build)
		b.Pinned = d.Pinned
		return b, nil
	})
}

func (ch *changeLog) add(list func() (*wire.Build, error)) error {
	if n := len(ch.reply.Builds); n < maxChanged && ch.space > 0 {
		one, err := list()
		if err != nil {
			return apierr.New(apierr.Internal, err, "change builds")
		}
		if ch.space.Reserve(one) || n == 0 {
			ch.reply.Builds = append(ch.reply.Builds, one)
			return nil
		}
	}
	ch.reply.More++
	return nil
}

// eachStored calls fn with each build that is still stored.
func (c *Changes) eachStored(ctx context.Context, ids []index.BuildID,
	fn func(*index.Build) error) error {
	for _, id := range ids {
		if ctx.Err() != nil {
			return apierr.FromContext(ctx, "change builds")
		}
		b, err := c.index.Get(id)
		if errors.Is(err, index.ErrNotFound) {
			continue // it was just removed
		}
		if err != nil {
			return apierr.New(apierr.Internal, err, "change builds")
		}
		if err := fn(&b); err != nil {
			return err
		}
	}
	return nil
}

// change calls do with each build that the names mean, unless dryRun is set, and reports them.
// layers says that builds of layers may be among them.
func (c *Changes) change(ctx context.Context, p request.Peer, names []string, dryRun, layers bool,
	do func(*index.Build) error) (*wire.ChangeReply, error) {
	ids, err := c.changeable(ctx, p, names, layers)
	if err != nil {
		return nil, err
	}
	out := c.newChangeLog(p)
	err = c.eachStored(ctx, ids, func(b *index.Build) error {
		if !dryRun {
			if err := do(b); err != nil {
				return request.StoreError(err, b.ModelName)
			}
		}
		return out.noteKept(b)
	})
	return out.reply, err
}

// Invalidate withholds the builds that the names mean: they are not served again, and the next
// request compiles. With dryRun it only reports them.
func (c *Changes) Invalidate(ctx context.Context, p request.Peer, names []string, reason string,
	dryRun bool) (*wire.ChangeReply, error) {
	return c.change(ctx, p, names, dryRun, true, func(b *index.Build) error {
		return c.store.Withhold(b.ID, index.Withheld, cmp.Or(reason, "invalidated by request"))
	})
}

// Pin protects the builds that the names mean, and those that replace them, from eviction. With
// dryRun it only reports them.
func (c *Changes) Pin(ctx context.Context, p request.Peer, names []string, dryRun bool) (
	*wire.ChangeReply, error) {
	return c.change(ctx, p, names, dryRun, false, func(b *index.Build) error {
		return c.store.Pin(ctx, b.ID, &index.Pin{At: c.now(), UID: p.UID})
	})
}

// Unpin undoes Pin. It is no error if a build was not pinned.
func (c *Changes) Unpin(ctx context.Context, p request.Peer, names []string, dryRun bool) (
	*wire.ChangeReply, error) {
	return c.change(ctx, p, names, dryRun, false, func(b *index.Build) error {
		return c.store.Pin(ctx, b.ID, nil)
	})
}

// Remove deletes the builds that the names mean, or all that the peer may change. Files that an
// application has loaded stay until it releases them. The reply's freed bytes are those that no
// other build needs.
func (c *Changes) Remove(ctx context.Context, p request.Peer, names []string, all,
	dryRun bool) (*wire.ChangeReply, error) {
	everything := all && c.rights.IsAdministrator(p)
	ids, err := c.buildsToRemove(ctx, p, names, all)
	if err != nil {
		return nil, err
	}
	freed := int64(0)
	if everything {
		freed, err = c.store.RemovableBytes(ctx)
	} else {
		freed, err = c.query.FreedByRemoval(ctx, p, ids)
	}
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "remove")
	}
	removed := c.newChangeLog(p)
	err = c.removeInBatches(ctx, ids, dryRun, removed)
	if err == nil && everything && !dryRun {
		left := int64(0)
		err = c.store.RemoveUnneeded(ctx)
		if err == nil {
			left, err = c.store.RemovableBytes(ctx) // what is still stored
		}
		if err != nil {
			err = apierr.New(apierr.Internal, err, "remove all")
		}
		freed = max(freed-left, 0)
	}
	removed.reply.FreedBytes = freed
	return removed.reply, err
}

// removeInBatches removes builds in batches, and records them; with dryRun it only records them.
func (c *Changes) removeInBatches(ctx context.Context, ids []index.BuildID, dryRun bool,
	removed *changeLog) error {
	var some []store.Removal
	remove := func() error {
		err := c.store.RemoveAll(some)
		for i := range some {
			d := &some[i]
			if d.Removed {
				removed.noteRemoved(d)
			}
			if !errors.Is(d.Err, index.ErrNotFound) { // otherwise it was just removed
				err = cmp.Or(err, d.Err)
			}
		}
		some = nil
		if err != nil {
			return apierr.New(apierr.Internal, err, "remove")
		}
		return nil
	}
	err := c.eachStored(ctx, ids, func(b *index.Build) error {
		if dryRun {
			return removed.noteKept(b)
		}
		_, pinned := c.index.Journal.Pinned(b.ID)
		some = append(some, store.Removal{Build: b, Why: "removed by request", Pinned: pinned})
		if len(some) < store.BatchSize {
			return nil
		}
		return remove()
	})
	if err != nil || len(some) == 0 {
		return err
	}
	return remove()
}

// buildsToRemove lists the builds that the names mean, or all that the peer may change.
func (c *Changes) buildsToRemove(ctx context.Context, p request.Peer, names []string, all bool) (
	ids []index.BuildID, err error) {
	if !all {
		return c.changeable(ctx, p, names, false)
	}
	err = c.index.EachBrief(ctx, index.BuildID{}, func(b *index.Brief) error {
		if c.rights.MayChange(p, b.Scope) {
			ids = append(ids, b.ID)
		}
		return nil
	})
	if err != nil {
		return nil, query.Error(ctx, err)
	}
	return ids, nil
}

// changeable lists the builds that the names mean. It fails if the peer may not change one of them.
// Without layers, builds of layers are left out, and a name that matches only such builds is an
// error.
func (c *Changes) changeable(ctx context.Context, p request.Peer, names []string, layers bool) (
	ids []index.BuildID, err error) {
	var below *index.Build
	err = c.query.EachNamed(ctx, p, names, func(b *index.Build) error {
		if !c.rights.MayChange(p, b.Scope) {
			return apierr.New(apierr.NotAllowed, nil,
				"build %s is shared: only administrators may change it", b.BuildKey)
		}
		if b.Layer != "" && !layers {
			below = b
			return nil
		}
		ids = append(ids, b.ID)
		return nil
	})
	if err == nil && len(ids) == 0 && below != nil {
		err = apierr.New(apierr.NotAllowed, nil, "build %.16s is in layer %s, which is only read",
			below.BuildKey, below.Layer).
			WithHint("withhold it: epcachectl invalidate %.16s", below.BuildKey)
	}
	if err != nil {
		return nil, err
	}
	return ids, nil
}

// Pack packs the builds that the names mean, or all that the peer may change, if that saves bytes
// and no client uses them. With dryRun it finds shared bytes, and reports how many packing would
// free. progress, which may be nil, counts builds.
func (c *Changes) Pack(ctx context.Context, p request.Peer, names []string, all, dryRun bool,
	progress func(done, total int64)) (*wire.PackReply, error) {
	ids, err := c.buildsToPack(ctx, p, names, all)
	if err != nil {
		return nil, err
	}
	return c.packEach(ctx, ids, true, progress, c.store.Packer().PackOnRequest(ctx, dryRun))
}

// packableBytes returns the bytes that packing would free of a build that stays unpacked because a
// client uses it, otherwise 0.
func (c *Changes) packableBytes(b *index.Build, outcome string) int64 {
	if !strings.HasPrefix(outcome, "kept: ") || c.store.WhyInUse(b) == "" {
		return 0
	}
	return c.store.Packer().PackSaving(b.ID)
}

// Unpack replaces the recipes of such builds by whole files, durably. They may be packed again when
// they are cold.
func (c *Changes) Unpack(ctx context.Context, p request.Peer, names []string, all, dryRun bool,
	progress func(done, total int64)) (*wire.PackReply, error) {
	ids, err := c.buildsToPack(ctx, p, names, all)
	if err != nil {
		return nil, err
	}
	return c.packEach(ctx, ids, false, progress, c.store.Packer().UnpackOnRequest(ctx, dryRun))
}

// packEach calls do with each build, and reports the outcome.
func (c *Changes) packEach(ctx context.Context, ids []index.BuildID, packs bool, progress func(done,
	total int64), do func(*index.Build) (string, int64, error)) (*wire.PackReply, error) {
	out, done := &wire.PackReply{}, int64(0)
	err := c.eachStored(ctx, ids, func(b *index.Build) error {
		if progress != nil {
			progress(done, int64(len(ids)))
		}
		done++
		outcome, frees, err := do(b)
		switch {
		case ctx.Err() != nil:
			return apierr.FromContext(ctx, "pack")
		case err != nil && c.isRemoved(b.ID): // evicted or removed in the meantime
			outcome, frees = "kept: "+store.KeptRemoved, 0
		case packing.IsMissingOrDamaged(err):
			outcome = "kept: " + c.store.WithholdDamaged(ctx, b, err)
		case err != nil:
			return request.StoreError(err, b.ModelName)
		}
		later := int64(0)
		if err == nil && packs {
			later = c.packableBytes(b, outcome)
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

// buildsToPack lists the builds for Pack or Unpack.
func (c *Changes) buildsToPack(ctx context.Context, p request.Peer, names []string, all bool) (
	[]index.BuildID, error) {
	switch {
	case all && len(names) > 0:
		return nil, apierr.New(apierr.BadRequest, nil, "pack: either all builds or named ones")
	case !all && len(names) == 0:
		return nil, apierr.New(apierr.BadRequest, nil, "pack: no build named")
	}
	return c.buildsToRemove(ctx, p, names, all)
}

func (c *Changes) isRemoved(id index.BuildID) bool {
	_, err := c.index.Get(id)
	return errors.Is(err, index.ErrNotFound)
}

// PlanCollection plans which builds to evict to reach the configured bounds, or the goal. It
// considers all builds for administrators, and otherwise the peer's own. progress, which may be
// nil, is told the progress of the survey.
func (c *Changes) PlanCollection(ctx context.Context, p request.Peer, goal store.Goal,
	progress func(*wire.Progress)) (*store.Collection, error) {
	goal.Progress = wire.StoreProgress(progress, "reading")
	return c.store.Collector().
		Plan(ctx, store.Owner{UID: p.UID, All: c.rights.IsAdministrator(p)}, goal)
}

// CollectReply reports what a plan would do, or what it has done.
func (c *Changes) CollectReply(plan *store.Collection) *wire.CollectReply {
	reply := &wire.CollectReply{FreedBytes: plan.Freed, UsedBytes: plan.Used,
		BudgetBytes: max(plan.Goal, 0), ShortBytes: plan.Short,
		PlanSeconds: plan.Took.Seconds(), Considered: plan.Considered,
		Removed: plan.Count(evict.Evict), Packed: plan.Count(evict.PackBuild),
		Copies: plan.Count(evict.DropCopy), More: uint32(len(plan.Steps) - len(plan.Records))}
	for i, b := range plan.Records {
		r := &plan.Steps[i]
		reply.Steps = append(reply.Steps, &wire.CollectStep{Build: b.BuildKey.String(),
			ModelName: wire.Clip(b.ModelName), Ep: wire.Clip(query.FirstEP(b)), Scope: b.Scope,
			FreesBytes: r.Frees, Reason: wire.Clip(r.Reason()), Outcome: wire.Clip(r.Outcome),
			CompileSeconds: b.CompileSeconds, LastUsedMs: wire.Milliseconds(r.Last),
			Models: uint32(max(1, len(b.Members))), Action: r.Action.String()})
	}
	for _, k := range plan.Kept {
		kept := &wire.Kept{Reason: k.Reason, Builds: k.Builds, Bytes: k.Bytes}
		for _, id := range k.First {
			if b, err := c.index.Get(id); err == nil { // else it was removed
				kept.Keys = append(kept.Keys, b.BuildKey.String())
			}
		}
		reply.Kept = append(reply.Kept, kept)
	}
	return reply
}

// Check checks the store's files, or with w.Space compares its account of bytes with the disk.
// progress may be nil.
func (c *Changes) Check(ctx context.Context, p request.Peer, w *wire.Check,
	progress func(*wire.Progress)) (*wire.CheckReply, error) {
	if !c.rights.IsAdministrator(p) {
		return nil, apierr.New(apierr.NotAllowed, nil, "only administrators may check the store")
	}
	if w.Space {
		return audit.Space(ctx, c.store, progress)
	}
	return audit.Check(ctx, c.store, w, progress)
}
