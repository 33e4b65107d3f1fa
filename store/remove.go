package store

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/views"
)

// Removal is a build to remove, and the outcome.
type Removal struct {
	Build  *index.Build
	Why    string
	Pinned bool // before its removal

	grace       time.Duration // for clients that know a path of its view
	may         func() bool   // called right before the removal; false prevents it; may be nil
	tombstone   *index.Tombstone
	view        *views.View
	checkedView func() // returns the borrowed view, unless that is dropped
	viewBytes   func() // ends counting its bytes on the disk

	step    *evict.Step          // the step of the plan, if it is an eviction
	parts   map[cas.Digest]int64 // blobs and bases of the build, with sizes
	guarded func()               // ends the collector's guard

	Removed bool
	Err     error // why it was not removed, or not completely
}

// RemoveAll removes builds: first the manifests, which is the commit point of each, then the views,
// then the blobs that no other build needs. The removals share syncs, of which one build alone
// needs about six. After a crash in between, the next start removes the leftovers. On an error, a
// crash may bring removed files back as leftovers.
func (st *Store) RemoveAll(list []Removal) error {
	h := &commitRequest{}
	for i := range list {
		d := &list[i]
		d.view, d.checkedView = st.views.BorrowFor(d.Build) // before the index drops its path
		one := &index.Change{ID: d.Build.ID, Why: d.Why, Tombstone: d.tombstone}
		h.builds = append(h.builds, &change{Change: one, may: d.may, then: func() {
			d.viewBytes = st.ledger.countRemoving(one.Freed)
		}})
	}
	failed := st.committer.commit(context.Background(), h) // only because the store is closed
	blobs := st.packing.Removal()
	for i, one := range h.builds {
		d := &list[i]
		if d.Removed, d.Err = one.done, one.Err; !d.Removed {
			d.checkedView()
			continue
		}
		if d.view != nil {
			st.views.Drop(d.Build.ID, d.view, d.grace)
		}
		// a new view may have been made since BorrowFor
		st.views.DropCurrent(d.Build.ID, d.grace)
		for _, f := range d.Build.Blobs() {
			_, err := blobs.Remove(f.Digest)
			d.Err = errors.Join(d.Err, err)
		}
		d.viewBytes()
	}
	st.views.Sweep()
	_, err := blobs.End()
	return cmp.Or(failed, err)
}
