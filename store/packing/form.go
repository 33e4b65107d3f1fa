package packing

import (
	"context"
	"errors"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// OnlyPacked tells that a blob is not whole, and that there is a recipe of it.
func (s *Store) OnlyPacked(d cas.Digest) bool { return s.shelf.Stands(d) && !s.whole.Has(d) }

// Packed gives what is known of a blob's recipe; false: there is none.
func (s *Store) Packed(d cas.Digest) (dedupe.Packed, bool) { return s.shelf.Has(d) }

// EachPacked calls fn for every blob that has a recipe.
func (s *Store) EachPacked(ctx context.Context, fn func(cas.Digest, dedupe.Packed) error) error {
	return s.shelf.Walk(ctx, fn)
}

// Users lists the blobs whose recipes take bytes from a blob.
func (s *Store) Users(container cas.Digest) []cas.Digest { return s.shelf.Users(container) }

// Complete tells whether it is known of all recipes what they need. As long as it is not, nothing may go for want of one.
func (s *Store) Complete() bool { return s.shelf.Complete() }

// ReadAgain tries once more to read the recipes that the system did not give when the store was opened.
func (s *Store) ReadAgain() { s.shelf.ReadAgain() }

// Problems lists the recipes that could not be read when the store was opened, and still are not.
func (s *Store) Problems() []dedupe.Problem { return s.shelf.Problems() }

// Size gives the plain bytes of a blob, whole or packed. Errors are cas.ErrNotFound and the system's.
func (s *Store) Size(d cas.Digest) (int64, error) {
	size, err := s.whole.Size(d)
	if !errors.Is(err, cas.ErrNotFound) || !s.shelf.Stands(d) {
		return size, err
	}
	if p, known := s.shelf.Has(d); known {
		return p.Size, nil
	}
	r, err := s.shelf.Get(d)
	if err != nil {
		return 0, err
	}
	return r.Size, nil
}

// Bytes gives the bytes on disk of each form of a blob, 0 for one that it does not have: whole, the recipe without its
// containers, unpacked.
func (s *Store) Bytes(d cas.Digest) (whole, recipe, unpacked int64) {
	whole, _ = cas.DiskBytesIn(s.dir, d) // of one that is not there, none
	if p, ok := s.shelf.Has(d); ok {
		recipe = p.Disk
	}
	if s.open.Load() != nil {
		unpacked, _ = cas.DiskBytesIn(s.folder, d) // likewise
	}
	return whole, recipe, unpacked
}

// EachCopy calls fn for every unpacked form that takes room on the store's own file system, with its bytes on disk.
func (s *Store) EachCopy(ctx context.Context, fn func(d cas.Digest, disk int64) error) error {
	open := s.open.Load()
	if open == nil || s.apart {
		return nil
	}
	return open.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		disk, err := cas.DiskBytesIn(s.folder, d)
		if err != nil {
			return nil //nolint:nilerr // it has just gone
		}
		return fn(d, disk)
	})
}

// CopyStamp is the stamp of a blob's unpacked form, from memory.
func (s *Store) CopyStamp(d cas.Digest) (cas.Stamp, bool) {
	open := s.open.Load()
	if open == nil {
		return cas.Stamp{}, false
	}
	return open.Stamp(d)
}
