package index

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/bbolt"
)

// A Change is a change of one build for Commit: publishing a staged build, or retracting one.
type Change struct {
	ID        BuildID
	Why       string     // of a retraction: for the history of its request
	Tombstone *Tombstone // of a retraction: durable before the removal; nil: none

	Freed int64 // bytes on disk of blobs that no build needs any more, as accounted for
	Err   error // why it failed; ErrNotFound: there is no such build

	build   Build
	publish bool
}

// Stage writes the manifest of a build to the disk under a temporary name, which Open removes. Its
// blobs have to be durable before.
func (x *Index) Stage(ctx context.Context, b Build) (*Change, error) {
	c := &Change{ID: b.ID, publish: true}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.Created = trimTime(b.Created)
	file, err := encodeManifest(b)
	if err == nil {
		// Decoded again, so that the build is exactly what a restart would read.
		c.build, err = decodeManifest(b.ID.String(), file)
	}
	if err == nil {
		err = x.manifests.stage(b.ID, file)
	}
	c.fail(err)
	return c, c.Err
}

// Commit carries out changes, durably when it returns, with one sync of each directory and one
// transaction. The error of one does not fail the others, and after a crash some may be done.
//
// The commit point of both kinds is the sync of the manifest's directory: after a crash the
// manifests decide which builds exist, and not the database. If the database cannot store a
// published build, for example on a full disk, the manifest is removed again. After a failed
// retraction the build may or may not exist, and can be retracted again. After a successful one its
// blobs and views may be removed.
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
		} else if c.Err == nil { // removed, even if the database fails
			x.forget(&c.build)
		} else {
			x.Journal.dropTombstone(c.ID)
		}
	}
	list = slices.DeleteFunc(list, undone)
	x.account(list)
}

// NoteRetracted adds an event to the history of the request of each build that Commit retracted.
func (x *Index) NoteRetracted(list []*Change) {
	for _, c := range list {
		if b := &c.build; !c.publish && c.Err == nil {
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
			// Without a manifest too, because an earlier removal may not have been synced.
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
			_ = m.fs.Remove(m.staged(c.ID)) // best effort: the next Open removes it
		}
	}
}

// account updates the database from the manifests, in one transaction, or if that fails in one for
// each change. Retracting uses the reserve, because bbolt needs new pages before it frees old ones.
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
			// Drop cached look-ups that read the rows before, before the build is no longer marked
			// as retracting.
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

// writeRows writes changed rows, and the times of the manifest directories that the database then
// matches.
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

// forget drops a build from all caches in memory.
func (x *Index) forget(b *Build) {
	x.knownMu.Lock()
	x.retracted[b.ID] = true
	x.knownMu.Unlock()
	x.dropEntries(b)
	x.Uses.forget(b.ID)
	x.rows.drop(bucketViews, b.ID[:])
	x.Journal.forget(b.ID)
}
