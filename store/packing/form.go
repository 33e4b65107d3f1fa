package packing

import (
	"context"
	"errors"
	"io"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// reader reads blobs in whichever form they are.
type reader struct {
	whole *cas.Store
	shelf *dedupe.Shelf
}

// OnlyPacked tells that a blob is not whole, and that there is a recipe of it.
func (s *reader) OnlyPacked(d cas.Digest) bool { return s.shelf.Stands(d) && !s.whole.Has(d) }

// Size gives the plain bytes of a blob, whole or packed. Errors are cas.ErrNotFound and the system's.
func (s *reader) Size(d cas.Digest) (int64, error) {
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

// Source is a blob that can be read.
type Source interface {
	dedupe.Source
	io.Closer
}

// Look opens a blob for looking at it, in whichever form it is. Nothing is verified, so nobody is served with these bytes.
func (s *reader) Look(d cas.Digest) (Source, error) {
	if !s.OnlyPacked(d) {
		f, _, err := s.unverified(d)
		return f, err
	}
	r, err := s.shelf.Get(d)
	if err != nil {
		return nil, err
	}
	return s.assemble(r)
}

// assemble gives what a recipe makes of its containers, unverified.
func (s *reader) assemble(r *dedupe.Recipe) (*dedupe.Assembled, error) {
	return dedupe.Assemble(r, func(d cas.Digest) (dedupe.Source, error) {
		f, _, err := s.unverified(d)
		return f, err
	})
}

// unverified opens a whole form. verified reports whether its stamp holds.
func (s *reader) unverified(d cas.Digest) (src *dedupe.File, verified bool, err error) {
	f, verified, err := s.whole.OpenUnverified(d)
	if err != nil {
		return nil, false, err
	}
	src, err = dedupe.NewFile(f)
	return src, verified, err
}

func (s *reader) openWhole(ctx context.Context, d cas.Digest) (*dedupe.File, error) {
	f, err := s.whole.Open(ctx, d)
	if err != nil {
		return nil, err
	}
	return dedupe.NewFile(f)
}
