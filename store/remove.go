package store

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/views"
)

// Removal is a build that is being removed, and what became of it.
type Removal struct {
	Build *index.Build
	Why   string

	grace       time.Duration // of clients that know a path of its view
	may         func() bool   // is asked last, when no caller can stop it any more; nil: it may
	tombstone   *index.Tombstone
	view        *views.View
	checkedView func() // ends the look at the view, unless that is dropped
	viewBytes   func() // ends its being counted on the disk

	step    *evict.Step          // of an eviction
	parts   map[cas.Digest]int64 // of the build
	guarded func()               // ends the collector's having it in hand

	Removed bool
	Err     error // why not, or what could not be removed of it
}

// RemoveAll removes builds: first the manifests, which is the commit point of each, then the views,
// then the blobs that nothing else needs. They share syncs: one build alone needs about six. A
// crash in between leaves leftovers, which the next start removes. The error says that what was
// removed may come back after a crash, as leftovers.
func (st *Store) RemoveAll(list []Removal) error {
	h := &commitRequest{}
	for i := range list {
		d := &list[i]
		d.view, d.checkedView = st.views.BorrowFor(d.Build) // before the index forgets where it is
		one := &index.Change{ID: d.Build.ID, Why: d.Why, Tombstone: d.tombstone}
		h.builds = append(h.builds, &change{Change: one, may: d.may, then: func() {
			d.viewBytes = st.ledger.countRemoving(one.Freed)
		}})
	}
	if err := st.committer.commit(context.Background(), h); err != nil {
		return err
	}
	blobs := st.forms.Removal()
	for i, one := range h.builds {
		d := &list[i]
		if d.Removed, d.Err = one.done, one.Err; !d.Removed {
			d.checkedView()
			continue
		}
		if d.view != nil {
			st.views.Drop(d.Build.ID, d.view, d.grace)
		}
		// it was made since: there was none, or that one was found not to be intact
		st.views.DropCurrent(d.Build.ID, d.grace)
		for _, f := range d.Build.Blobs() {
			_, err := blobs.Remove(f.Digest)
			d.Err = errors.Join(d.Err, err)
		}
		d.viewBytes()
	}
	st.views.Sweep()
	_, err := blobs.End()
	return err
}
