package atrest

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/flock"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/views"
)

// View is a folder that has a build's files, and is held against its removal until Folder is closed.
type View struct {
	Folder *os.File // what a view's descriptor is
	Path   string   // of Folder
	ID     string   // the folder in it that has the files
}

func viewIn(f *os.File, inner string) *View {
	return &View{Folder: f, Path: filepath.Dir(inner), ID: filepath.Base(inner)}
}

// View finds a build's files and hashes them: those of a view, which it gives, or where the store has no sound one, the blobs and what is packed of
// them, and then the view is nil. There is an error for a build, which may be a group's, unless all files are what they should be.
func (s *Store) View(ctx context.Context, b *index.Build) (*View, error) {
	for _, inner := range s.viewsOf(b) {
		f, err := leaseOf(filepath.Dir(inner))
		if err != nil {
			continue
		}
		if soundFiles(ctx, b, inner) {
			return viewIn(f, inner), nil
		}
		f.Close() // only looked at
	}
	for _, f := range b.Files {
		if err := s.check(ctx, f); err != nil {
			return nil, s.blame(b, f, err)
		}
	}
	return nil, nil
}

// viewsOf lists the folders in views of the store that may be the build's, which only the database knows by build, by the graph's name: it
// is made of the build key. Where this user may not list the views there are none.
func (s *Store) viewsOf(b *index.Build) (inner []string) {
	scope := filepath.Join(s.dir, "views", views.ScopeFolder(b.Scope))
	found, err := filepath.Glob(filepath.Join(globLiteral(scope), "*", "*", globLiteral(filepath.FromSlash(b.Graph))))
	if err != nil {
		return nil // a bad pattern, which this is not
	}
	for _, graph := range found {
		inner = append(inner, strings.TrimSuffix(graph, string(filepath.Separator)+filepath.FromSlash(b.Graph)))
	}
	return inner
}

func globLiteral(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// leaseOf opens a view's folder and holds it against its removal.
func leaseOf(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err == nil {
		_ = flock.Share(f) // a file system without locks: nobody would remove anything there
	}
	return f, err
}

// soundFiles tells whether every file of the build is there and has its bytes: another view of a build with this name may lack some, and what
// was unpacked was never synced.
func soundFiles(ctx context.Context, b *index.Build, inner string) bool {
	for _, f := range b.Files {
		path := filepath.Join(inner, filepath.FromSlash(f.Name))
		info, err := os.Lstat(path)
		if err != nil || !info.Mode().IsRegular() || info.Size() != f.Size {
			return false
		}
		if got, err := cas.SumFile(ctx, path); err != nil || got != f.Digest {
			return false
		}
	}
	return true
}

// check hashes a file of a build, unpacking it for nobody where it is packed.
func (s *Store) check(ctx context.Context, f index.File) error {
	blob, err := s.blob(f)
	if err != nil {
		return err
	}
	defer blob.Close()
	return sumIs(ctx, blob, blob.Size(), f)
}

// sumIs compares the bytes that are read with what the file has to be.
func sumIs(ctx context.Context, from io.ReaderAt, size int64, f index.File) error {
	got, err := cas.Sum(ctx, from, 0, size)
	if err == nil && got != f.Digest {
		err = &cas.CorruptError{Digest: f.Digest, Got: got}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name, err)
	}
	return nil
}
