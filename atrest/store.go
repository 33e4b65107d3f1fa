package atrest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
)

// Store is the store in a state folder, read in place.
type Store struct{ dir string }

// In is the store in the state folder dir.
func In(dir string) *Store { return &Store{dir} }

// blob is a blob of a store that is only read, whole or packed. Its bytes are not verified.
type blob interface {
	dedupe.Source
	io.Closer
}

// blob opens a file's blob in the form that the store has. Errors are cas.ErrNotFound, those of recipes, and the system's.
func (s *Store) blob(f index.File) (blob, error) {
	whole, err := s.object(f.Digest)
	if err == nil || !errors.Is(err, cas.ErrNotFound) {
		return whole, err
	}
	recipe, err := dedupe.OpenRecipe(s.dir, f.Digest)
	if err != nil {
		return nil, err
	}
	if err := forms.SizeIs(recipe, f.Size); err != nil {
		return nil, err
	}
	return dedupe.Assemble(recipe, func(d cas.Digest) (dedupe.Source, error) { return s.object(d) })
}

func (s *Store) object(d cas.Digest) (blob, error) {
	name := d.String()
	f, err := cas.OS{}.Open(filepath.Join(s.dir, "objects", name[:2], name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, cas.ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &dedupe.FormatError{Offset: -1, Reason: fmt.Sprintf("blob %s is not a regular file", d)} // and may never end
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return dedupe.NewFile(f)
}

// Open gives a file of a build, of whichever form: the caller reads it once and closes it. What is read was hashed by View; who reads later hashes
// again.
func (s *Store) Open(b *index.Build, f index.File) (io.ReadCloser, error) {
	blob, err := s.blob(f)
	if err != nil {
		return nil, s.blame(b, f, err)
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(blob, 0, blob.Size()), blob}, nil
}

// Damaged tells whether an error says that what is stored is not what it should be.
func Damaged(err error) bool {
	var container *dedupe.ContainerError
	return forms.Broken(err) || errors.As(err, &container)
}

// blame says of an error of one file that the build cannot be served, and who can do what about it.
func (s *Store) blame(b *index.Build, f index.File, err error) error {
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, fs.ErrPermission):
		return refusal.New(refusal.NotAllowed, err, "build %.12s cannot be read", b.BuildKey).WithHint("whoever makes the store a factory image lets others read it: chmod -R a+rX %s", s.dir)
	case errors.Is(err, dedupe.ErrNewer):
		return refusal.New(refusal.Version, err, "build %.12s: %s", b.BuildKey, f.Name).WithHint("read it with the epcached that packed it, or a later one")
	case Damaged(err):
		return fmt.Errorf("build %.12s%s: %s: %w", b.BuildKey, asUnit(b), f.Name, err)
	case errors.Is(err, cas.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return refusal.New(refusal.NotFound, nil, "build %.12s%s: %s is not in %s", b.BuildKey, asUnit(b), f.Name, s.dir).WithHint("that store's daemon compiles anew what is lost")
	}
	return refusal.New(refusal.Internal, err, "build %.12s: %s", b.BuildKey, f.Name)
}

// asUnit says that a group is there as a whole or not at all.
func asUnit(b *index.Build) string {
	if len(b.Members) == 0 {
		return ""
	}
	return fmt.Sprintf(", a group of %d models that is served as a whole or not at all", len(b.Members))
}
