package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cas"
)

// RemoveUnneeded removes all files that no build needs: blobs that a crash left, unused views, and
// the quarantine. A leased view is removed when its lease ends.
func (st *Store) RemoveUnneeded(ctx context.Context) error {
	err := errors.Join(st.views.DropUnknown(ctx), st.RemoveLeftovers(ctx))
	st.views.Sweep()
	return errors.Join(err, st.emptyQuarantine())
}

// RemovableBytes returns how many bytes on disk removing everything would free: blobs in all
// representations, leftovers and the quarantine.
func (st *Store) RemovableBytes(ctx context.Context) (sum int64, err error) {
	err = st.cas.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		disk, _ := st.WholeBytes(d) // 0 for one that was just removed
		sum += disk
		return nil
	})
	if err != nil {
		return 0, err
	}
	packed, err := st.packing.Space(true)
	if err != nil {
		return 0, err
	}
	sum += packed.Recipes + packed.Copies
	entries, err := os.ReadDir(st.path("quarantine"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // otherwise it was removed in the meantime
			sum += cas.RoundUpToBlock(info.Size())
		}
	}
	return sum, nil
}

// emptyQuarantine removes the files in quarantine, with their notes.
func (st *Store) emptyQuarantine() (err error) {
	entries, err := os.ReadDir(st.path("quarantine"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(st.path("quarantine"), e.Name())))
	}
	return err
}
