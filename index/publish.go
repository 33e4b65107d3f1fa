package index

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
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
	x.changing.Lock()
	defer x.changing.Unlock()
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
	x.touch(b.ID[0], times)
	x.dropEntries(&b)
	return nil
}

// commit gives the manifest its name, durably: data synced, linked without
// replacing, folder synced.
func (x *Index) commit(id BuildID, file []byte) error {
	temp := filepath.Join(x.incoming, id.String())
	if err := cas.WriteFile(x.FS, temp, file); err != nil {
		// After a failed sync the file's bytes cannot be trusted: try again with a new one.
		if err = cas.WriteFile(x.FS, temp, file); err != nil {
			return err
		}
	}
	// Visible to a start from here on, though a power cut may take it back. A
	// crash before this line leaves only the staged file, which Open removes.
	if err := x.FS.Link(temp, x.manifestPath(id)); err != nil {
		return errors.Join(err, x.FS.Remove(temp))
	}
	if err := x.FS.SyncDir(x.folderPath(id[0])); err != nil {
		return errors.Join(err, x.uncommit(id), x.FS.Remove(temp))
	}
	// From here on the build is published. The staged name that stays behind
	// if this fails is removed by the next Open.
	_ = x.FS.Remove(temp)
	return nil
}

func (x *Index) uncommit(id BuildID) error {
	return errors.Join(x.FS.Remove(x.manifestPath(id)), x.FS.SyncDir(x.folderPath(id[0])))
}
