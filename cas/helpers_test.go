package cas

import (
	"context"
	"io/fs"
	"os"
)

// Put, PutFile and AdoptHashed are those of a Hold that keeps nothing.
func (s *Store) Put(ctx context.Context, r Source) (Digest, int64, error) {
	return s.put(ctx, r, nil)
}

func (s *Store) PutFile(ctx context.Context, f *os.File) (Digest, int64, error) {
	return s.putFile(ctx, f, nil)
}

func (s *Store) AdoptHashed(ctx context.Context, path string, known Hashed) (Digest, int64, error) {
	return s.adoptHashed(ctx, path, known, nil)
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
