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

// Phases receive how far a view is that a request waits for.
type Phases struct {
	Phase    func(string)            // "unpacking", "verifying"
	Unpacked func(done, total int64) // bytes; may be nil
}

// unpackAll makes the unpacked form of each of the build's packed files.
func (st *Store) unpackAll(ctx context.Context, b *index.Build, p Phases) error {
	begins := func() { p.Phase("unpacking") }
	for i := range b.Files {
		if f := &b.Files[i]; st.forms.OnlyPacked(f.Digest) {
			noRoom := st.evictForCopy(ctx, f.Size)
			err := st.forms.Unpack(ctx, f.Digest, begins, p.Unpacked)
			if errors.Is(err, packing.ErrNoSpace) && noRoom != nil {
				err = noRoom // it has more to say
			}
			if err != nil {
				return fmt.Errorf("%s: %w", f.Name, err)
			}
		}
	}
	return nil
}

// evictForCopy evicts what may be evicted for an unpacked copy. The copy's own reservation is made
// while its blob is locked, and evicts nothing.
func (st *Store) evictForCopy(ctx context.Context, size int64) error {
	if _, apart := st.forms.Copies.Directory(); apart {
		return nil
	}
	place := &Reservation{st: st}
	defer place.Release()
	return place.ResizeTo(ctx, true, cas.RoundUpToBlock(size), 0)
}

// View returns a view of the build with every file checked: the one in use, one of an earlier run,
// or a new one, for which it unpacks what is packed.
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
		// It was packed just now, or what was unpacked is gone already.
	}
}

// viewAttempts bounds how often a view is begun again because a form of a blob was removed.
const viewAttempts = 3
