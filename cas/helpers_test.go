package cas

import (
	"context"
	"io/fs"
	"os"
)

// Put, PutFile and AdoptHashed are those of a Hold that is released.
func (s *Store) Put(ctx context.Context, r Source) (Digest, int64, error) {
	h := s.Hold()
	defer h.Release()
	return h.Put(ctx, r)
}

func (s *Store) PutFile(ctx context.Context, f *os.File) (Digest, int64, error) {
	h := s.Hold()
	defer h.Release()
	return h.PutFile(ctx, f)
}

func (s *Store) AdoptHashed(ctx context.Context, path string, known Hashed) (Digest, int64, error) {
	h := s.Hold()
	defer h.Release()
	return h.AdoptHashed(ctx, path, known)
}

// Foreign returns the paths of what stands among the objects and is no blob.
func (s *Store) Foreign(ctx context.Context) ([]string, error) {
	var paths []string
	err := s.each(ctx, func(path string, _ Digest, _ fs.FileInfo, ok bool) error {
		if !ok {
			paths = append(paths, path)
		}
		return nil
	})
	return paths, err
}
