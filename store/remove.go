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

	grace     time.Duration // of those who were told a path of its view
	may       func() bool   // is asked right before it goes, when nobody can stop that any more; nil: it may
	tombstone *index.Tombstone
	gone      bool

	Err error // why not, or what could not be removed of it
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
	changes := make([]*change, len(list))
	left := make([]func(), len(list))      // end its being counted on the disk
	seen := make([]*views.View, len(list)) // before the index forgets where they are
	looked := make([]func(), len(list))
	for i := range list {
		d := &list[i]
		seen[i], looked[i] = st.views.LookAt(d.Build)
		one := &index.Change{ID: d.Build.ID, Why: d.Why, Tombstone: d.tombstone}
		changes[i] = &change{Change: one, may: d.may, then: func() { left[i] = st.ledger.leave(one.Freed) }}
	}
	if err := st.committer.commit(context.Background(), &handed{builds: changes}); err != nil {
		return err
	}
	blobs := st.forms.Removal()
	for i := range list {
		d := &list[i]
		if d.gone, d.Err = changes[i].done, changes[i].Err; !d.gone {
			if seen[i] != nil {
				looked[i]()
			}
			continue
		}
		if seen[i] != nil {
			st.views.Drop(d.Build.ID, seen[i], d.grace)
		}
		st.views.DropCurrent(d.Build.ID, d.grace) // it was made since: there was none, or that one was found not to be intact
		for _, f := range d.Build.Blobs() {
			_, err := blobs.Remove(f.Digest)
			d.Err = errors.Join(d.Err, err)
		}
		left[i]()
		went(d)
	}
	st.views.Sweep()
	_, err := blobs.End()
	return err
}
