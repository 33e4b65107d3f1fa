package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cas"
)

// RemoveUnneeded removes all that no build needs: blobs that a crash left, unused views, and the
// quarantine. Views that are leased are removed when the lease ends.
func (st *Store) RemoveUnneeded(ctx context.Context) error {
	err := errors.Join(st.views.DropUnknown(ctx), st.RemoveLeftovers(ctx))
	st.views.Sweep()
	return errors.Join(err, st.emptyQuarantine())
}

// RemovableBytes returns the bytes on disk that are freed when everything is removed: builds in
// all their forms, leftovers and the quarantine.
func (st *Store) RemovableBytes(ctx context.Context) (sum int64, err error) {
	err = st.cas.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		disk, _ := st.WholeBytes(d) // of one that has just gone, none
		sum += disk
		return nil
	})
	if err != nil {
		return 0, err
	}
	packed, err := st.forms.Space(true)
	if err != nil {
		return 0, err
	}
	sum += packed.Recipes + packed.Copies
	entries, err := os.ReadDir(st.path("quarantine"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // else it is gone meanwhile
			sum += cas.RoundUpToBlock(info.Size())
		}
	}
	return sum, nil
}

// emptyQuarantine removes what was put aside, with its notes.
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
