package cas

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// PutLinked makes the file at path a blob, and returns its digest and length
// when it is durable. path stays, as a further name of it: somebody is served
// from there already. known is what HashAhead found out about the file, under
// whatever name, before anybody else could reach it. Other bytes are ErrChanged.
//
// What could still be written, lies elsewhere, or is there as a blob already
// stays a file of its own.
func (h *Hold) PutLinked(ctx context.Context, path string, known Hashed) (Digest, int64, error) {
	d, n, err := h.s.putLinked(ctx, path, known, h)
	if err != nil {
		return Digest{}, 0, fmt.Errorf("store %s under a further name: %w", path, err)
	}
	return d, n, nil
}

func (s *Store) putLinked(ctx context.Context, path string, known Hashed, h *Hold) (Digest, int64, error) {
	f, err := s.fs.Open(path)
	if err != nil {
		return Digest{}, 0, err
	}
	d, n, err := s.linkOpen(ctx, f, path, known, h)
	return d, n, errors.Join(err, f.Close())
}

func (s *Store) linkOpen(ctx context.Context, f *os.File, path string, known Hashed, h *Hold) (Digest, int64, error) {
	if known == (Hashed{}) {
		return Digest{}, 0, fmt.Errorf("%w: it was not hashed before", ErrChanged)
	}
	now, err := s.hash(ctx, f) // its new name has changed its ctime, so the stamp of then says nothing
	if err != nil {
		return Digest{}, 0, err
	}
	if now != (Hashed{}) && now.digest != known.digest {
		return Digest{}, 0, fmt.Errorf("%w: digest %s before, %s after", ErrChanged, known.digest, now.digest)
	}
	err = errElsewhere
	if now != (Hashed{}) {
		err = s.commit(ctx, f, path, now.digest, linked, h)
	}
	if !errors.Is(err, errElsewhere) {
		return now.digest, now.stamp.Size, err
	}
	d, n, err := s.putFile(ctx, f, h)
	if err == nil && d != known.digest {
		err = fmt.Errorf("%w: digest %s before, %s after", ErrChanged, known.digest, d)
	}
	return d, n, err
}
