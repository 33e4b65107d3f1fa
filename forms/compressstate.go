package forms

import (
	"context"
	"os"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Compressing is what is to be said of compressing one blob.
type Compressing int8

// The states of a blob.
const (
	NotCompressible Compressing = iota // it is too small, or nobody needs it
	IsCompressed
	IsDense     // it was tried, and gains too little
	IsTakenFrom // others take bytes from it, or would
	MayBe       // a sample has to tell
)

// CompressingOf tells of a blob whether it is compressed, or may be; of one that may be, what that would be done to. It reads no blob.
func (s *Store) CompressingOf(ctx context.Context, d cas.Digest) (Compressing, Compressible, error) {
	p, packed := s.shelf.Has(d)
	var x Compressible
	switch {
	case s.whole.Has(d):
		size, err := s.whole.Size(d)
		if err != nil {
			return NotCompressible, x, ignoreNotFound(err)
		}
		x = Compressible{d, d, size}
	case packed && p.Compressed > 0:
		return IsCompressed, x, nil
	case packed && p.Literals != dedupe.NoLiterals:
		own := p.Containers[p.Literals]
		x = Compressible{d, own.Digest, own.Size}
	default:
		return NotCompressible, x, nil
	}
	switch found, _ := s.share(x.Bytes); {
	case !worthCompressing(x.Size, 0):
		return NotCompressible, x, nil
	case found.dense:
		return IsDense, x, nil
	case x.alone() && found.Saving > 0 && !found.Little:
		return NotCompressible, x, nil // it is packed before
	case !s.mayCompress(&x):
		return IsTakenFrom, x, nil
	}
	wanted, err := s.wanted(ctx)
	if err == nil && wanted[x.Bytes] {
		return IsTakenFrom, x, nil
	}
	return MayBe, x, err
}

// Expected estimates from a sample how many bytes on disk compressing frees; 0: too little. What does not gain is noted.
func (s *Store) Expected(ctx context.Context, x Compressible, gate Gate) (int64, error) {
	f, err := s.openWhole(ctx, x.Bytes)
	if err != nil {
		return 0, err
	}
	defer f.Close() // read-only: nothing can be lost
	stored, err := dedupe.Compressed(ctx, behind(ctx, f, gate))
	if err != nil {
		return 0, err
	}
	if !worthCompressing(x.Size, stored) {
		return 0, s.noteDense(x.Bytes)
	}
	return cas.OnDisk(x.Size) - cas.OnDisk(stored), nil
}

// PackedSince is when the recipe of a blob was written as it is now; the zero time where that cannot be told.
func (s *Store) PackedSince(d cas.Digest) time.Time {
	info, err := os.Lstat(dedupe.RecipePath(s.dir, d))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}
