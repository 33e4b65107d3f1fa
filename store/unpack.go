package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
)

// Phases are told the progress of making a view.
type Phases struct {
	Phase    func(string)            // "unpacking", "verifying"
	Unpacked func(done, total int64) // bytes; may be nil
}

// unpackAll makes unpacked copies of the build's packed files.
func (st *Store) unpackAll(ctx context.Context, b *index.Build, p Phases) error {
	begins := func() { p.Phase("unpacking") }
	for i := range b.Files {
		if f := &b.Files[i]; st.packing.OnlyPacked(f.Digest) {
			noRoom := st.evictForCopy(ctx, f.Size)
			err := st.packing.Unpack(ctx, f.Digest, begins, p.Unpacked)
			if errors.Is(err, packing.ErrNoSpace) && noRoom != nil {
				err = noRoom // it has more details
			}
			if err != nil {
				return fmt.Errorf("%s: %w", f.Name, err)
			}
		}
	}
	return nil
}

// evictForCopy evicts builds to make space for an unpacked copy. That is separate from the copy's
// reservation, which is made while its blob is locked and so must not evict.
func (st *Store) evictForCopy(ctx context.Context, size int64) error {
	place := &Reservation{st: st}
	defer place.Release()
	return place.ResizeTo(ctx, true, cas.RoundUpToBlock(size), 0)
}

// View returns a view of the build after checking every file: the current view, one of an earlier
// run, or a new one, for which it unpacks packed files.
func (st *Store) View(ctx context.Context, b *index.Build, p Phases) (*views.View, error) {
	if b.Layer != "" {
		return st.Layers.View(ctx, b, func() { p.Phase("verifying") })
	}
	if v := st.views.CurrentIntact(b.ID); v != nil {
		return v, nil
	}
	for attempt := 1; ; attempt++ {
		if err := st.unpackAll(ctx, b, p); err != nil {
			return nil, err
		}
		v, err := st.views.Get(ctx, b, func() { p.Phase("verifying") })
		if !errors.Is(err, cas.ErrNotFound) || attempt == viewAttempts ||
			!st.views.NeedsUnpacking(b) {
			return v, err
		}
		// It was packed just now, or the unpacked copy was removed already.
	}
}

// viewAttempts bounds the retries of making a view because a file of a blob was removed in the
// meantime.
const viewAttempts = 3
