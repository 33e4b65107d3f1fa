package store

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/views"
)

// Removal is a build that is being removed, and what became of it.
type Removal struct {
	Build *index.Build
	Why   string
	grace time.Duration // of those who were told a path of its view
	may   func() bool   // is asked right before it goes, when nobody can stop that any more; nil: it may

	view   *views.View
	looked func() // ends the look at the view, unless that is dropped
	left   func() // ends its being counted on the disk

	gone bool
	Err  error // why not, or what could not be removed of it
}

// Remove removes a build: first its manifest, which is the commit point, then its view, then the
// blobs that nothing else needs. A crash in between leaves leftovers, which the next start
// removes. grace protects readers that were told a path of its view.
func (st *Store) Remove(ctx context.Context, b *index.Build, why string, grace time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	one := []Removal{{Build: b, Why: why, grace: grace}}
	return errors.Join(st.RemoveAll(one, func(*Removal) {}), one[0].Err)
}

// RemoveAll is Remove of several builds, step by step for all of them, so that they share syncs:
// one build alone needs about six. It calls went when the blobs of a build that nothing else needs
// have no name any more. The error says that what was removed may come back after a crash, as
// leftovers.
func (st *Store) RemoveAll(list []Removal, went func(*Removal)) error {
	gone := make([]index.Retraction, len(list))
	for i := range list {
		d := &list[i]
		gone[i] = index.Retraction{ID: d.Build.ID, Why: d.Why, May: func() bool {
			if d.may != nil && !d.may() {
				return false
			}
			d.view, d.looked = st.views.LookAt(d.Build) // before the index forgets where it is
			d.left = st.ledger.leave(st.wholeBytesOf(d.Build))
			return true
		}}
	}
	st.index.RetractAll(gone)
	blobs := st.forms.Removal()
	for i := range list {
		d := &list[i]
		if d.gone, d.Err = gone[i].Gone, gone[i].Err; d.gone {
			if d.view != nil {
				st.views.Drop(d.Build.ID, d.view, d.grace)
			}
			st.views.DropCurrent(d.Build.ID, d.grace) // it was made since: there was none, or that one was found not to be intact
			for _, f := range d.Build.Blobs() {
				_, err := blobs.Remove(f.Digest)
				d.Err = errors.Join(d.Err, err)
			}
		}
		if d.view != nil && !d.gone {
			d.looked()
		}
		if d.left != nil {
			d.left()
		}
		if d.gone {
			went(d)
		}
	}
	st.views.Sweep()
	_, err := blobs.End()
	return err
}
