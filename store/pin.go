package store

import (
	"context"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
)

// Pin protects a build from eviction, or with nil unpins it, durably when it returns. It is no
// error if the build was not pinned. It fails if the user's pins would take more than the user's
// share.
func (st *Store) Pin(ctx context.Context, id index.BuildID, pin *index.Pin) error {
	if pin != nil {
		return movePin(ctx, st, id, pin, id)
	}
	return st.committer.mark(ctx, &index.Mark{ID: id})
}

// movePin pins a build instead of another one, which may be the same.
func movePin(ctx context.Context, st *Store, id index.BuildID, pin *index.Pin,
	from index.BuildID) error {
	st.pinning.Lock()
	defer st.pinning.Unlock()
	if err := mayPin(st, id, pin.UID, from); err != nil {
		return err
	}
	marks := []*index.Mark{{ID: id, Pin: pin}}
	if from != id {
		marks = append(marks, &index.Mark{ID: from})
	}
	return st.committer.mark(ctx, marks...)
}

func mayPin(st *Store, id index.BuildID, uid uint32, from index.BuildID) error {
	bounds, err := st.Bounds()
	if err != nil || !bounds.shares(uid) {
		return err
	}
	bytes := func(id index.BuildID) (sum int64) {
		b, _ := st.index.Get(id) // zero if it was just removed
		for i := range b.Files {
			sum += b.Files[i].Size
		}
		return sum
	}
	has, more := int64(0), bytes(id)
	for _, one := range st.index.Journal.PinnedBuilds() {
		if pin, _ := st.index.Journal.Pinned(one); pin.UID == uid && one != id && one != from {
			has += bytes(one)
		}
	}
	if has+more > bounds.Share {
		return NoSpace("it has %s, and uid %d has pinned %s of at most %s (its share of the "+
			"budget)",
			bytesize.Text(more), uid, bytesize.Text(has), bytesize.Text(bounds.Share)).
			WithHint("unpin other builds: epcachectl unpin; or raise user_share in [space]")
	}
	return nil
}
