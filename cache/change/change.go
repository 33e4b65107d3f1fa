// Package change carries out what users and administrators ask to have done with stored builds:
// withhold, remove, pin, pack, unpack, evict and check. A user changes its own builds, and an
// administrator all.
package change

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
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

// New returns the changes of a store.
func New(s *store.Store, q *query.Queries, r *rights.Rights, now func() time.Time) *Changes {
	return &Changes{store: s, index: s.Index(), query: q, rights: r, now: now}
}

// changing reports the builds that were changed, or would be: the first of them, as many as fit
// into an answer.
type changing struct {
	query *query.Queries
	peer  request.Peer
	reply *wire.ChangeReply
	left  wire.Left
}

// maxChanged is how many of the builds that were changed an answer lists.
const maxChanged = 256

func (c *Changes) changed(p request.Peer) *changing {
	return &changing{c.query, p, &wire.ChangeReply{}, wire.MaxReply}
}

// took notes a build that is still stored, and gone one that was removed.
func (ch *changing) took(b *index.Build) error {
	return ch.note(func() (*wire.Build, error) { return ch.query.Listed(ch.peer, b) })
}

func (ch *changing) gone(b *index.Build) {
	_ = ch.note(func() (*wire.Build, error) { return ch.query.Listing(b), nil }) // cannot fail
}

func (ch *changing) note(list func() (*wire.Build, error)) error {
	if n := len(ch.reply.Builds); n < maxChanged && ch.left > 0 {
		one, err := list()
		if err != nil {
			return apierr.New(apierr.Internal, err, "change builds")
		}
		if ch.left.Takes(one) || n == 0 {
			ch.reply.Builds = append(ch.reply.Builds, one)
			return nil
		}
	}
	ch.reply.More++
	return nil
}

// eachOf calls fn with the builds that are still there, one after the other.
func (c *Changes) eachOf(ctx context.Context, ids []index.BuildID,
	fn func(*index.Build) error) error {
	for _, id := range ids {
		if ctx.Err() != nil {
			return apierr.New(apierr.Cancelled, ctx.Err(), "change builds")
		}
		b, err := c.index.Get(id)
		if errors.Is(err, index.ErrNotFound) {
			continue // it has just gone
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

// change calls do with each build that the names mean, unless dryRun is set, and reports the
// builds.
func (c *Changes) change(ctx context.Context, p request.Peer, names []string, dryRun bool,
	do func(*index.Build) error) (*wire.ChangeReply, error) {
	ids, err := c.changeable(ctx, p, names)
	if err != nil {
		return nil, err
	}
	out := c.changed(p)
	err = c.eachOf(ctx, ids, func(b *index.Build) error {
		if !dryRun {
			if err := do(b); err != nil {
				return request.StoreError(err, b.ModelName)
			}
		}
		return out.took(b)
	})
	return out.reply, err
}

// Invalidate withholds the builds that the names mean: they are not served again, and the next
// request compiles. With dryRun it only reports them.
func (c *Changes) Invalidate(ctx context.Context, p request.Peer, names []string, reason string,
	dryRun bool) (*wire.ChangeReply, error) {
	return c.change(ctx, p, names, dryRun, func(b *index.Build) error {
		return c.store.Withhold(b.ID, index.Withheld, cmp.Or(reason, "invalidated by hand"))
	})
}

// Pin protects the builds that the names mean, and those that replace them, from eviction. With
// dryRun it only reports them.
func (c *Changes) Pin(ctx context.Context, p request.Peer, names []string, dryRun bool) (
	*wire.ChangeReply, error) {
	return c.change(ctx, p, names, dryRun, func(b *index.Build) error {
		return c.store.Pin(ctx, b.ID, &index.Pin{At: c.now(), UID: p.UID})
	})
}

// Unpin takes that back. It is no error if a build was not pinned.
func (c *Changes) Unpin(ctx context.Context, p request.Peer, names []string, dryRun bool) (
	*wire.ChangeReply, error) {
	return c.change(ctx, p, names, dryRun, func(b *index.Build) error {
		return c.store.Pin(ctx, b.ID, nil)
	})
}

// Remove deletes the builds that the names mean, or all that the peer may change. Files that an
// application has loaded stay until it releases them. Freed are the bytes on disk that no other
// build needs, in the account of what each build has of its own.
func (c *Changes) Remove(ctx context.Context, p request.Peer, names []string, all,
	dryRun bool) (*wire.ChangeReply, error) {
	everything := all && c.rights.Administrator(p)
	ids, err := c.toRemove(ctx, p, names, all)
	if err != nil {
		return nil, err
	}
	freed := int64(0)
	if everything {
		freed, err = c.store.RemovableBytes(ctx)
	} else {
		freed, err = c.query.FreedBy(ctx, p, ids)
	}
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "remove")
	}
	removed := c.changed(p)
	err = c.removeByHand(ctx, ids, dryRun, removed)
	if err == nil && everything && !dryRun {
		left := int64(0)
		err = c.store.RemoveRest(ctx)
		if err == nil {
			left, err = c.store.RemovableBytes(ctx) // what is stored meanwhile
		}
		if err != nil {
			err = apierr.New(apierr.Internal, err, "remove all")
		}
		freed = max(freed-left, 0)
	}
	removed.reply.FreedBytes = freed
	return removed.reply, err
}

// removeByHand removes builds in batches, and notes those that were removed; with dryRun it only
// notes them all.
func (c *Changes) removeByHand(ctx context.Context, ids []index.BuildID, dryRun bool,
	removed *changing) error {
	var some []store.Removal
	remove := func() error {
		err := c.store.RemoveAll(some)
		for i := range some {
			d := &some[i]
			if d.Gone {
				removed.gone(d.Build)
			}
			if !errors.Is(d.Err, index.ErrNotFound) { // else it has just gone
				err = cmp.Or(err, d.Err)
			}
		}
		some = nil
		if err != nil {
			return apierr.New(apierr.Internal, err, "remove")
		}
		return nil
	}
	err := c.eachOf(ctx, ids, func(b *index.Build) error {
		if dryRun {
			return removed.took(b)
		}
		some = append(some, store.Removal{Build: b, Why: "removed by hand"})
		if len(some) < store.AtOnce {
			return nil
		}
		return remove()
	})
	if err != nil || len(some) == 0 {
		return err
	}
	return remove()
}

// toRemove lists the builds that the names mean, or all that the peer may change.
func (c *Changes) toRemove(ctx context.Context, p request.Peer, names []string, all bool) (
	ids []index.BuildID, err error) {
	if !all {
		return c.changeable(ctx, p, names)
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
func (c *Changes) changeable(ctx context.Context, p request.Peer, names []string) (
	ids []index.BuildID, err error) {
	err = c.query.EachNamed(ctx, p, names, func(b *index.Build) error {
		if !c.rights.MayChange(p, b.Scope) {
			return apierr.New(apierr.NotAllowed, nil,
				"build %s is shared: changing it is for administrators", b.BuildKey)
		}
		ids = append(ids, b.ID)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return ids, nil
}
