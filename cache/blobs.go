package cache

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// openForms opens what keeps blobs whole, packed and unpacked.
func (c *Cache) openForms() error {
	folder, apart := c.path("unpacked"), false
	if c.options.UnpackedDir != "" {
		var err error
		if folder, apart, err = c.unpackElsewhere(); err != nil {
			return fmt.Errorf("unpacked_dir %q: %w", c.options.UnpackedDir, err)
		}
	}
	var err error
	c.forms, err = packing.Open(packing.Options{Dir: c.dir, Copies: folder, Apart: apart, Whole: c.cas, FS: c.options.fs, Memory: c.index,
		Sketches: c.index.Sketches, Shares: c.index.Shares, Changed: c.sharing.changed, Owner: blobOwner{c}, Log: c.log})
	return err
}

// unpackElsewhere makes a folder of our own in the one that is configured, which other stores, or users, may share.
func (c *Cache) unpackElsewhere() (folder string, apart bool, err error) {
	own := digestOf([]byte(c.dir))
	folder = filepath.Join(c.options.UnpackedDir, "epcached-"+hex.EncodeToString(own[:8]))
	mode := os.FileMode(0o700)
	if c.options.PathAccess {
		mode = 0o711
	}
	if err := os.Mkdir(folder, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", false, err
	}
	info, err := os.Lstat(folder)
	if err != nil {
		return "", false, err
	}
	if !info.IsDir() || !cas.OwnedBy(info, c.uid) {
		return "", false, fmt.Errorf("%s: not a folder of user %d", folder, c.uid) // somebody else's: what is read from it could be changed
	}
	if err := os.Chmod(folder, mode); err != nil {
		return "", false, err
	}
	here, err := cas.StampPath(c.dir)
	if err != nil {
		return "", false, err
	}
	there, err := cas.StampPath(folder)
	if err != nil {
		return "", false, err
	}
	return folder, here.Dev != there.Dev, nil
}

// blobOwner is the cache as package packing knows it: it implements forms.Owner.
type blobOwner struct{ c *Cache }

func (o blobOwner) Needed(d cas.Digest) (bool, error) {
	if !o.c.index.Complete() {
		return true, nil // there are builds that cannot be read, and nobody knows what they need
	}
	ids, err := o.c.index.Needs(d)
	return len(ids) > 0, err
}

// LetGo is forms.Owner's: views keep the bytes of their blobs.
func (o blobOwner) LetGo(d cas.Digest) error { return o.c.dropViews(d) }

// InHand is forms.Owner's: a request that is making a view of it is attended from before its first link until the view is in use.
func (o blobOwner) InHand(d cas.Digest) bool {
	ids, err := o.c.index.Needs(d)
	return err != nil || slices.ContainsFunc(ids, func(id index.BuildID) bool { return o.c.attend.busy(id) || o.c.hasView(id) })
}

func (o blobOwner) MayTake(d cas.Digest) (func(from cas.Digest) (bool, error), error) {
	own, err := o.c.reachOf(d)
	return func(from cas.Digest) (bool, error) {
		theirs, err := o.c.reachOf(from)
		return err == nil && own.may(theirs), err
	}, err
}

// Reserve is forms.Owner's. It evicts nothing, because the caller holds locks of blobs.
func (o blobOwner) Reserve(ctx context.Context, disk, instead int64) (release func(), err error) {
	place := &reservation{c: o.c, above: instead}
	err = place.resizeTo(ctx, false, disk, 0)
	return place.release, err
}

func (o blobOwner) Shrinks(disk int64) (done func()) { return o.c.places.shrinks(disk) }

func (o blobOwner) Fits(folder, what string, size, instead int64) error {
	free, err := cas.FreeBytes(folder)
	if err != nil {
		return err
	}
	if instead > size {
		return fitsBeside(what, size, free, spareOfLess)
	}
	return fits(what, size, free)
}

// remeasure brings the account of blobs to what they take: a crash may have come between a change of form and its being accounted for.
func (c *Cache) remeasure(ctx context.Context, wrong []cas.Digest) error {
	if len(wrong) == 0 {
		return nil
	}
	leave, err := c.forms.TakeTurn(ctx) // nobody packs meanwhile
	if err != nil {
		return err
	}
	defer leave()
	for _, d := range wrong {
		err = errors.Join(err, c.index.Remeasure(d))
	}
	c.log.Info("space of blobs accounted for anew", "blobs", len(wrong))
	return err
}

// needed is a build with the one of its blobs that is meant.
type needed struct {
	build index.BuildID
	blob  cas.Digest
}

// needs lists the builds that need a blob: as one of theirs, or as a container of one that is packed.
func (c *Cache) needs(d cas.Digest) (all []needed, err error) {
	add := func(blob cas.Digest) error {
		ids, err := c.index.Needs(blob)
		for _, id := range ids {
			all = append(all, needed{id, blob})
		}
		return err
	}
	err = add(d)
	for _, user := range c.forms.Recipes.Users(d) {
		if !c.cas.Has(user) {
			err = errors.Join(err, add(user))
		}
	}
	return all, err
}

// neededBy lists the builds that need a blob. A build may be listed twice.
func (c *Cache) neededBy(d cas.Digest) (ids []index.BuildID, err error) {
	needs, err := c.needs(d)
	for _, n := range needs {
		ids = append(ids, n.build)
	}
	return ids, err
}

// reach are the scopes of the builds that need a blob.
type reach map[string]struct{}

// may tells whether a blob of these scopes may take bytes from one of those: what is shared is for all, and what is not, for who has
// it anyway. So no user's blob stays, or is read, for the sake of another's.
func (r reach) may(theirs reach) bool {
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

// reachOf gives the scopes of the builds that need a blob; of a container that no build needs, those of the blobs that are packed with it.
func (c *Cache) reachOf(d cas.Digest) (reach, error) {
	out := make(reach)
	if err := c.addReach(out, d); err != nil || len(out) > 0 {
		return out, err
	}
	for _, user := range c.forms.Recipes.Users(d) {
		if err := c.addReach(out, user); err != nil {
			return out, err
		}
	}
	return out, nil
}

func (c *Cache) addReach(out reach, d cas.Digest) error {
	ids, err := c.index.Needs(d)
	if err != nil {
		return err
	}
	for _, id := range ids {
		b, err := c.index.Get(id)
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
