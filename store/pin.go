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
	return st.committer.mark(ctx, nil, &index.Mark{ID: id})
}

// movePin pins a build instead of another one, which may be the same.
func movePin(ctx context.Context, st *Store, id index.BuildID, pin *index.Pin,
	from index.BuildID) error {
	bounds, err := st.Bounds()
	if err != nil {
		return err
	}
	var may func() error
	if bounds.shares(pin.UID) {
		may = func() error { return mayPin(st, id, pin.UID, from, bounds.Share) }
	}
	marks := []*index.Mark{{ID: id, Pin: pin}}
	if from != id {
		marks = append(marks, &index.Mark{ID: from})
	}
	return st.committer.mark(ctx, may, marks...)
}

func mayPin(st *Store, id index.BuildID, uid uint32, from index.BuildID, share int64) error {
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
	if has+more > share {
		return NoSpace("it has %s, and uid %d has pinned %s of at most %s (its share of the "+
			"budget)",
			bytesize.Text(more), uid, bytesize.Text(has), bytesize.Text(share)).
			WithHint("unpin other builds: epcachectl unpin; or raise user_share in [space]")
	}
	return nil
}
