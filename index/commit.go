package index

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/bbolt"
)

// A Change is what Commit does to one build: it publishes a staged one, or retracts one.
type Change struct {
	ID        BuildID
	Why       string     // of a retraction: for the history of its request
	Tombstone *Tombstone // of a retraction: durable before the build goes; nil: it leaves none

	Freed int64 // bytes on disk of blobs that no build needs any more, as accounted for
	Err   error // why it is not done; ErrNotFound: there is no such build

	build   Build
	publish bool
}

// Stage writes the manifest of a build to the disk, under a name that no start takes for a build's.
// Its blobs have to be durable before.
func (x *Index) Stage(ctx context.Context, b Build) (*Change, error) {
	c := &Change{ID: b.ID, publish: true}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.Created = trimTime(b.Created)
	file, err := encodeManifest(b)
	if err == nil {
		// The same bytes are served that a restart would read.
		c.build, err = decodeManifest(b.ID.String(), file)
	}
	if err == nil {
		err = x.manifests.stage(b.ID, file)
	}
	c.fail(err)
	return c, c.Err
}

// Commit does some changes, durably when it returns, with one sync of each directory and one
// transaction. The error of one does not fail the others, and after a crash some may be done.
//
// The commit point is the synced directory of the manifest, both ways: after a crash the build is
// there or not, whatever the database says. If the database cannot take a build that is published
// (a full disk), the manifest is taken back. A build that could not be retracted may be there or
// not, and can be retracted again; the blobs and views of one that was may be removed. It leaves a
// line in the history of its request.
func (x *Index) Commit(list []*Change) {
	x.manifests.changing.Lock()
	defer x.manifests.changing.Unlock()
	seen := make(map[BuildID]bool)
	undone := func(c *Change) bool { return c.Err != nil }
	for _, c := range list {
		if !c.publish && seen[c.ID] {
			c.fail(ErrNotFound)
		} else if !c.publish {
			if c.build, c.Err = x.Get(c.ID); c.build.Layer != "" {
				c.Err = ErrNotFound
			}
			c.fail(c.Err)
		}
		seen[c.ID] = true
	}
	list = slices.DeleteFunc(slices.Clone(list), undone)
	x.Journal.addTombstones(list)
	list = slices.DeleteFunc(list, undone)
	x.manifests.linkAndUnlink(list)
	for _, c := range list {
		if c.publish {
			continue
		} else if c.Err == nil { // it is gone, whatever becomes of the rest
			x.forget(&c.build)
		} else {
			x.Journal.dropTombstone(c.ID)
		}
	}
	list = slices.DeleteFunc(list, undone)
	x.account(list)
	for _, c := range list {
		if b := &c.build; !c.publish {
			note := Event{At: x.now(), Kind: "retracted", RequestKey: b.RequestKey, BuildID: b.ID,
				Text: c.Why, BuildKey: b.BuildKey, ModelName: b.ModelName, Scope: b.Scope,
				By: fmt.Sprintf("uid:%d", b.UID)}
			if err := x.Journal.note(note); err != nil {
				x.Log.Warn("cannot write history", "build", b.ID, "error", err)
			}
		}
	}
}

// fail records the error of a change; nil has no effect.
func (c *Change) fail(err error) {
	if err != nil && c.publish {
		c.Err = fmt.Errorf("publish build %s: %w", c.ID, err)
	} else if err != nil {
		c.Err = fmt.Errorf("retract build %s: %w", c.ID, err)
	}
}

// linkAndUnlink links or unlinks the names of manifests, durably.
func (m *manifests) linkAndUnlink(list []*Change) {
	touched := make(map[byte]bool)
	for _, c := range list {
		if c.publish {
			// a crash before this leaves only the staged file, which Open removes
			c.fail(m.link(c.ID))
		} else {
			// One without a manifest was deleted, or unlinked without a sync: make that durable.
			c.fail(remove(m.fs, m.path(c.ID)))
		}
		if c.Err == nil {
			touched[c.ID[0]] = true
		}
	}
	failed := m.sync(touched) // the commit point
	for _, c := range list {
		if err := failed[c.ID[0]]; err != nil && c.Err == nil {
			if c.publish {
				err = errors.Join(err, m.uncommit(c.ID))
			}
			c.fail(err)
		}
		if c.publish {
			_ = m.fs.Remove(m.staged(c.ID)) // a name that stays is removed by the next Open
		}
	}
}

// account brings the database to what manifests say, in one transaction; where that fails, in one
// for each change. Retracting takes of the reserve, because pages are taken before others are free.
func (x *Index) account(list []*Change) {
	times := make(map[byte]dirTimes)
	for _, c := range list {
		times[c.ID[0]] = x.manifests.currentTimes(c.ID[0])
	}
	write := func() error { return x.writeRows(list, times) }
	var err error
	if slices.ContainsFunc(list, func(c *Change) bool { return c.publish }) {
		err = write()
	} else if len(list) > 0 {
		err = x.Reserve.Use(write)
	}
	switch {
	case err == nil:
		for i, t := range times {
			x.manifests.noteChanged(i, t)
		}
		for _, c := range list {
			// A look-up that read the rows before must not be kept, once the mark is off.
			x.dropEntries(&c.build)
			x.knownMu.Lock()
			delete(x.retracted, c.ID)
			x.knownMu.Unlock()
		}
	case len(list) > 1:
		for _, c := range list {
			x.account([]*Change{c})
		}
	case list[0].publish:
		list[0].fail(errors.Join(err, x.manifests.uncommit(list[0].ID)))
	default:
		x.manifests.dirs[list[0].ID[0]].stale = true
		x.Log.Warn("index.db still has a retracted build; the next start drops it", "build",
			list[0].ID, "error", err)
	}
}

// writeRows writes changed rows, and the times of manifest directories that the database then has.
func (x *Index) writeRows(list []*Change, times map[byte]dirTimes) error {
	return x.db.write(func(tx *bbolt.Tx) (err error) {
		for _, c := range list {
			if c.publish {
				err = x.addBuild(tx, c.build)
			} else {
				c.Freed, err = removeBuild(tx, c.ID)
			}
			if err != nil {
				return err
			}
		}
		for i, t := range times {
			if err := x.manifests.putTimes(tx, i, t); err != nil {
				return err
			}
		}
		return nil
	})
}

// forget drops all that memory holds of a build.
func (x *Index) forget(b *Build) {
	x.knownMu.Lock()
	x.retracted[b.ID] = true
	x.knownMu.Unlock()
	x.dropEntries(b)
	x.Uses.forget(b.ID)
	x.rows.drop(bucketViews, b.ID[:])
	x.Journal.forget(b.ID)
}
