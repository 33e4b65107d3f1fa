package store

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// openForms opens the part that stores blobs, whole and packed, with unpacked copies.
func (st *Store) openForms() (err error) {
	st.packing, err = packing.Open(packing.Options{Dir: st.dir, Whole: st.cas, FS: st.options.FS,
		Memory: st.index, Sketches: st.index.Sketches, Shares: st.index.Shares,
		Changed: st.packer.EnqueueChanged, Owner: blobOwner{st}, Log: st.log})
	return err
}

// blobOwner implements packing.Owner, the part of the store that package packing needs.
type blobOwner struct{ st *Store }

func (o blobOwner) Needed(d cas.Digest) (bool, error) {
	if !o.st.index.Complete() {
		return true, nil // unreadable builds may need it
	}
	ids, err := o.st.index.Needs(d)
	return len(ids) > 0, err
}

// DropViews implements packing.Owner: it removes the views of all builds that have the blob among
// their files, because a view keeps the bytes. It does nothing if one of these builds is in use.
func (o blobOwner) DropViews(d cas.Digest) error {
	ids, err := o.st.index.Needs(d)
	if err != nil {
		return err
	}
	var builds []index.Build
	for _, id := range ids {
		b, err := o.st.index.Get(id)
		if err != nil {
			continue // removed in the meantime
		}
		if why := o.st.WhyInUse(&b); why != "" {
			return fmt.Errorf("%w: %s", packing.ErrInUse, why)
		}
		builds = append(builds, b)
	}
	for i := range builds {
		if v := o.st.views.ForBuild(&builds[i]); v != nil {
			o.st.views.Drop(builds[i].ID, v, 0)
		}
	}
	o.st.views.Sweep()
	return nil
}

// BeingServed implements packing.Owner. A request guards its build from before the first link of a
// new view until the view is in use.
func (o blobOwner) BeingServed(d cas.Digest) bool {
	ids, err := o.st.index.Needs(d)
	return err != nil || slices.ContainsFunc(ids, func(id index.BuildID) bool {
		return o.st.buildGuard.inUse(id) || o.st.views.CurrentView(id) != nil
	})
}

func (o blobOwner) MayTake(d cas.Digest) (func(from cas.Digest) (bool, error), error) {
	own, err := o.scopesOf(d)
	return func(from cas.Digest) (bool, error) {
		theirs, err := o.scopesOf(from)
		return err == nil && own.mayTakeFrom(theirs), err
	}, err
}

// Reserve implements packing.Owner. It evicts nothing, because the caller holds locks of blobs.
func (o blobOwner) Reserve(ctx context.Context, disk, instead int64) (release func(), err error) {
	place := &Reservation{st: o.st, above: instead}
	err = place.ResizeTo(ctx, false, disk, 0)
	return place.Release, err
}

func (o blobOwner) CountTransient(disk int64) (done func()) {
	return o.st.ledger.countTransient(disk)
}

func (o blobOwner) Fits(dir, what string, size, instead int64) error {
	free, err := cas.FreeBytes(dir)
	if err != nil {
		return err
	}
	if instead > size {
		return fitsLeaving(what, size, free, copyReserveOfSmall)
	}
	return Fits(what, size, free)
}

// remeasure corrects the accounted sizes of blobs, which are stale after a crash during packing or
// unpacking.
func (st *Store) remeasure(ctx context.Context, wrong []cas.Digest) error {
	if len(wrong) == 0 {
		return nil
	}
	leave, err := st.packing.LockRepresentation(ctx) // so that no blob is packed in the meantime
	if err != nil {
		return err
	}
	defer leave()
	for _, d := range wrong {
		err = errors.Join(err, st.index.Remeasure(d))
	}
	st.log.Info("space of blobs measured again", "blobs", len(wrong))
	return err
}

// Need is a build that needs a blob, as one of its files or as a base of one.
type Need struct {
	Build index.BuildID
	Blob  cas.Digest
}

// Needs lists the builds that need a blob: as one of their files, or as a base of a packed one.
func (st *Store) Needs(d cas.Digest) (all []Need, err error) {
	add := func(blob cas.Digest) error {
		ids, err := st.index.Needs(blob)
		for _, id := range ids {
			all = append(all, Need{id, blob})
		}
		return err
	}
	err = add(d)
	for _, user := range st.packing.Recipes.Users(d) {
		if !st.cas.Has(user) {
			err = errors.Join(err, add(user))
		}
	}
	return all, err
}

// scopeSet are the scopes of the builds that need a blob.
type scopeSet map[string]struct{}

// mayTakeFrom reports whether a blob of these scopes may take bytes from one of those: if the base
// is shared, or has all of these scopes. Otherwise a user's blob would be kept and read for another
// user's build.
func (r scopeSet) mayTakeFrom(theirs scopeSet) bool {
	if _, shared := theirs["shared"]; shared {
		return true
	}
	for scope := range r {
		if _, too := theirs[scope]; !too {
			return false
		}
	}
	return len(r) > 0
}

// scopesOf returns the scopes of the builds that need a blob; for a base, of its packed blobs.
func (o blobOwner) scopesOf(d cas.Digest) (scopeSet, error) {
	out := make(scopeSet)
	if err := o.addScopes(out, d); err != nil || len(out) > 0 {
		return out, err
	}
	for _, user := range o.st.packing.Recipes.Users(d) {
		if err := o.addScopes(out, user); err != nil {
			return out, err
		}
	}
	return out, nil
}

func (o blobOwner) addScopes(out scopeSet, d cas.Digest) error {
	ids, err := o.st.index.Needs(d)
	if err != nil {
		return err
	}
	for _, id := range ids {
		b, err := o.st.index.Get(id)
		if errors.Is(err, index.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		out[b.Scope] = struct{}{}
	}
	return nil
}
