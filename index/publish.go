package index

import (
	"context"
	"errors"
	"fmt"

	"go.etcd.io/bbolt"
)

// Publish makes a build known, durably when it returns. Its blobs have to be durable before. The
// newest build of a build key and scope supersedes the others, which Lookup still gives after it.
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
	x.manifests.changing.Lock()
	defer x.manifests.changing.Unlock()
	if err := x.manifests.commit(b.ID, file); err != nil {
		return fmt.Errorf("publish build %s: %w", b.ID, err)
	}
	times := x.manifests.lookAt(b.ID[0])
	err = x.db.write(func(tx *bbolt.Tx) error {
		if err := x.addBuild(tx, b); err != nil {
			return err
		}
		return x.manifests.note(tx, b.ID[0], times)
	})
	if err != nil {
		return fmt.Errorf("publish build %s: %w", b.ID, errors.Join(err, x.manifests.uncommit(b.ID)))
	}
	x.manifests.touch(b.ID[0], times)
	x.dropEntries(&b)
	return nil
}
