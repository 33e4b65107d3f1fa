package index

import (
	"fmt"
	"maps"
	"slices"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// Retraction is a build that RetractAll takes back, and what became of it.
type Retraction struct {
	ID  BuildID
	Why string      // for the history of its request; read when the build has gone
	May func() bool // is asked right before it goes; nil: it may

	Gone bool  // it has, durably
	Err  error // why not, unless May said that it may not. ErrNotFound: it was not there
}

// RetractAll takes builds back, in this order, durably when it returns, and leaves a line in the
// history of the request of each. Their blobs and views may be removed only afterwards. After an
// error the build may be there or not; RetractAll can be called again. Each is by itself: after a
// crash some may be gone. What makes it fast is that the manifests are all unlinked before their
// folders are synced, each once, and that one transaction takes the rows of all of them. A caller
// that publishes in one of the folders waits, so there should not be many at once.
func (x *Index) RetractAll(list []Retraction) {
	x.manifests.changing.Lock()
	defer x.manifests.changing.Unlock()
	builds := make([]Build, len(list))
	unlinked := make(map[byte][]int) // by folder
	for i := range list {
		r, err := &list[i], error(nil)
		builds[i], err = x.Get(r.ID)
		switch {
		case err != nil:
			r.fail(err)
		case r.May != nil && !r.May():
		default:
			// One without a manifest was deleted, or unlinked by an earlier call that failed to sync:
			// make that durable.
			if err := remove(x.FS, x.manifests.path(r.ID)); err != nil {
				r.fail(err)
			} else {
				unlinked[r.ID[0]] = append(unlinked[r.ID[0]], i)
			}
		}
	}
	var gone []int
	folders := slices.Sorted(maps.Keys(unlinked))
	paths := make([]string, len(folders))
	for k, folder := range folders {
		paths[k] = x.manifests.folder(folder)
	}
	for k, err := range cas.SyncDirs(x.FS, paths) { // the commit point of each one's builds
		for _, i := range unlinked[folders[k]] {
			if r := &list[i]; err != nil {
				r.fail(err)
			} else {
				r.Gone = true
				gone = append(gone, i)
			}
		}
	}
	if len(gone) == 0 {
		return
	}
	slices.Sort(gone) // as they were given
	// These are gone, whatever becomes of the rest.
	x.dropRows(builds, gone)
	for _, i := range gone {
		b := &builds[i]
		note := Event{At: x.now(), Kind: "retracted", RequestKey: b.RequestKey, BuildID: b.ID, Text: list[i].Why,
			BuildKey: b.BuildKey, ModelName: b.ModelName, Scope: b.Scope, By: fmt.Sprintf("uid:%d", b.UID)}
		if err := x.Journal.note(note); err != nil {
			x.Log.Warn("history could not be written", "build", b.ID, "error", err)
		}
	}
}

func (r *Retraction) fail(err error) { r.Err = fmt.Errorf("retract build %s: %w", r.ID, err) }

// dropRows takes the rows of builds that are gone out of the database, in one transaction.
func (x *Index) dropRows(builds []Build, gone []int) {
	times := make(map[byte]folderTimes)
	for _, i := range gone {
		x.forget(&builds[i])
		times[builds[i].ID[0]] = folderTimes{}
	}
	for i := range times {
		times[i] = x.manifests.lookAt(i)
	}
	err := x.reserve.use(func() error { // pages are taken before others are free
		return x.db.write(func(tx *bbolt.Tx) error {
			for _, i := range gone {
				if err := removeBuild(tx, builds[i].ID); err != nil {
					return err
				}
			}
			for i, t := range times {
				if err := x.manifests.note(tx, i, t); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		x.Log.Warn("index.db still has retracted builds; the next start drops them", "builds", len(gone), "first", builds[gone[0]].ID, "error", err)
		return
	}
	for i, t := range times {
		x.manifests.touch(i, t)
	}
	for _, i := range gone {
		// A look-up that read the rows before they went must not be kept once the mark is off.
		x.dropEntries(&builds[i])
		x.knownMu.Lock()
		delete(x.gone, builds[i].ID)
		x.knownMu.Unlock()
	}
}

// forget drops all that memory holds of a build.
func (x *Index) forget(b *Build) {
	x.knownMu.Lock()
	x.gone[b.ID] = true
	x.knownMu.Unlock()
	x.dropEntries(b)
	x.Uses.forget(b.ID)
	x.soft.drop(bucketViews, b.ID[:])
	x.Journal.forget(b.ID)
}
