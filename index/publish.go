package index

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"go.etcd.io/bbolt"
)

// Publish makes a build known, durably when it returns. Its blobs have to be
// durable before. The newest build of a build key and scope supersedes the
// others, which Lookup still gives after it.
//
// The commit point is the synced folder: after a crash before it there is no
// build, after it there is, whatever the database says. If the database cannot
// take the build (a full disk), the manifest is taken back.
func (x *Index) Publish(ctx context.Context, b Build) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.Created = trimTime(b.Created)
	file, err := encodeManifest(b)
	if err != nil {
		return fmt.Errorf("publish build %s: %w", b.ID, err)
	}
	// What is served is what a restart would read.
	b, err = decodeManifest(b.ID.String(), file)
	if err != nil {
		return fmt.Errorf("publish build %s: %w", b.ID, err)
	}
	f := &x.folders[b.ID[0]]
	f.turn.lock(x.db.waits)
	defer f.turn.unlock()
	if err := x.commit(b.ID, file); err != nil {
		return fmt.Errorf("publish build %s: %w", b.ID, err)
	}
	times := x.lookAt(b.ID[0])
	err = x.db.write(func(tx *bbolt.Tx) error {
		if err := x.addBuild(tx, b); err != nil {
			return err
		}
		return x.noteFolder(tx, b.ID[0], times)
	})
	if err != nil {
		return fmt.Errorf("publish build %s: %w", b.ID, errors.Join(err, x.uncommit(b.ID)))
	}
	f.seen, f.touched = times, true
	x.wake()
	x.dropEntries(&b)
	return nil
}

// commit gives the manifest its name, durably: data synced, linked without
// replacing, folder synced.
func (x *Index) commit(id BuildID, file []byte) error {
	temp := filepath.Join(x.incoming, id.String())
	if err := x.stage(temp, file); err != nil {
		// Whatever failed, a sync above all, leaves bytes that nobody can
		// trust: once more, into a new file.
		if err = x.stage(temp, file); err != nil {
			return err
		}
	}
	// Visible to a start from here on, though a power cut may take it back. A
	// crash before this line leaves only the staged file, which Open removes.
	if err := x.fs.Link(temp, x.manifestPath(id)); err != nil {
		return errors.Join(err, x.fs.Remove(temp))
	}
	if err := x.fs.SyncDir(x.folderPath(id[0])); err != nil {
		return errors.Join(err, x.uncommit(id), x.fs.Remove(temp))
	}
	// From here on the build is published. The staged name that stays behind
	// if this fails is removed by the next Open.
	_ = x.fs.Remove(temp)
	return nil
}

func (x *Index) stage(path string, file []byte) error {
	f, err := x.fs.Create(path)
	if err != nil {
		return err
	}
	_, err = x.fs.WriteAt(f, file, 0)
	if err == nil {
		err = x.fs.Sync(f)
	}
	err = errors.Join(err, f.Close())
	if err != nil {
		err = errors.Join(err, x.fs.Remove(path))
	}
	return err
}

func (x *Index) uncommit(id BuildID) error {
	return errors.Join(x.fs.Remove(x.manifestPath(id)), x.fs.SyncDir(x.folderPath(id[0])))
}

// Retract takes a build back, durably when it returns, and leaves a line in
// the history of its request. Its blobs and its view may go only afterwards.
// After an error the build may be there or not; Retract can be called again.
func (x *Index) Retract(ctx context.Context, id BuildID, why string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b, err := x.Get(id)
	if err != nil {
		return fmt.Errorf("retract build %s: %w", id, err)
	}
	f := &x.folders[id[0]]
	f.turn.lockToRetract()
	defer f.turn.unlock()
	err = x.fs.Remove(x.manifestPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // an earlier Retract failed to sync, or somebody deleted it: make that durable
	}
	if err == nil {
		err = x.fs.SyncDir(x.folderPath(id[0])) // the commit point
	}
	if err != nil {
		return fmt.Errorf("retract build %s: %w", id, err)
	}
	// The build is gone, whatever becomes of the rest.
	x.forget(b)
	times := x.lookAt(id[0])
	err = x.reserve.use(func() error { // pages are taken before others are free
		x.db.writing.lockToRetract()
		return x.db.writeInTurn(func(tx *bbolt.Tx) error {
			if err := removeBuild(tx, id); err != nil {
				return err
			}
			return x.noteFolder(tx, id[0], times)
		})
	})
	if err != nil {
		x.log.Warn("index.db still has a retracted build; the next start drops it", "build", id, "error", err)
	} else {
		// A look-up that read the rows before they went must not be kept once
		// the mark is off.
		x.dropEntries(&b)
		x.knownMu.Lock()
		delete(x.gone, id)
		x.knownMu.Unlock()
		f.seen, f.touched = times, true
		x.wake()
	}
	note := Event{At: x.now(), Kind: "retracted", RequestKey: b.RequestKey, BuildID: id, Text: why,
		BuildKey: b.BuildKey, ModelName: b.ModelName, Scope: b.Scope, By: fmt.Sprintf("uid:%d", b.UID)}
	if err := x.journal.note(note); err != nil {
		x.log.Warn("history could not be written", "build", id, "error", err)
	}
	return nil
}

// forget drops all that memory holds of a build.
func (x *Index) forget(b Build) {
	x.knownMu.Lock()
	x.gone[b.ID] = true
	x.knownMu.Unlock()
	x.dropEntries(&b)
	x.soft.drop(bucketUse, b.ID[:])
	x.soft.drop(bucketViews, b.ID[:])
	x.journal.forget(b.ID)
}
