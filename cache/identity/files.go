package identity

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/filestamp"
)

// Files are the files of one model.
type Files struct {
	Name     string // for messages; not part of the identity
	Path     string // where the client found it, never part of identity; "": not known
	Graph    *os.File
	External map[string]*os.File // by location
}

// NeedFilesError is the error of a request whose model refers to external data that the client has
// not sent.
type NeedFilesError struct {
	Locations []string
	Members   []int // of a group: index of the model of each location; nil: all of the first
}

func (e *NeedFilesError) Error() string {
	return fmt.Sprintf("the model refers to %d files of external data that the request does not "+
		"have", len(e.Locations))
}

// AllFiles lists every file of the models in a fixed order.
func AllFiles(models ...Files) (files []*os.File) {
	for _, m := range models {
		files = append(files, m.Graph)
		for _, l := range slices.Sorted(maps.Keys(m.External)) {
			files = append(files, m.External[l])
		}
	}
	return files
}

// DistinctFiles lists the files of the models, each once: several names may share a descriptor.
func DistinctFiles(models ...Files) (files []*os.File) {
	seen := make(map[*os.File]bool)
	for _, f := range AllFiles(models...) {
		if !seen[f] {
			seen[f] = true
			files = append(files, f)
		}
	}
	return files
}

// DuplicateAll returns the models with duplicates of their descriptors, which the caller closes. A
// descriptor that several names share is duplicated once, because a request may repeat one as often
// as it likes.
func DuplicateAll(models ...Files) (own []Files, err error) {
	made := make(map[*os.File]*os.File)
	again := func(f *os.File) *os.File {
		if made[f] == nil && err == nil {
			made[f], err = Duplicate(f)
		}
		return made[f]
	}
	for _, m := range models {
		one := Files{Name: m.Name, Graph: again(m.Graph),
			External: make(map[string]*os.File, len(m.External))}
		for location, f := range m.External {
			one.External[location] = again(f)
		}
		own = append(own, one)
	}
	if err != nil {
		CloseAll(own...)
		return nil, err
	}
	return own, nil
}

// CloseAll closes the files of the models, . Errors are ignored, because files opened for reading
// lose no data.
func CloseAll(models ...Files) {
	for _, f := range AllFiles(models...) {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Read reads the model's graph.
func (f Files) Read(ctx context.Context) (*epmodel.Model, error) {
	return f.Tensors(ctx, func(*epmodel.Initializer) {})
}

// Tensors reads the model's graph as Read does, and calls each with every tensor, with some of them
// perhaps twice.
func (f Files) Tensors(ctx context.Context,
	each func(*epmodel.Initializer)) (*epmodel.Model, error) {
	src, err := epmodel.FileSource(f.Graph)
	if err != nil {
		return nil, apierr.New(apierr.BadModel, err, "model %q cannot be read", f.Name)
	}
	m, err := epmodel.Tensors(ctx, f.Name, src, each)
	if err != nil {
		return nil, f.ModelError(err)
	}
	return m, nil
}

// Interface reads the interface of the model.
func (f Files) Interface(ctx context.Context) (*epmodel.Interface, error) {
	src, err := epmodel.FileSource(f.Graph)
	if err == nil {
		var found *epmodel.Interface
		if found, err = epmodel.ReadInterface(ctx, f.Name, src); err == nil {
			return found, nil
		}
	}
	return nil, f.ModelError(err)
}

// ChangedError returns the error for a model that changed after it was hashed.
func (f Files) ChangedError(err error) error {
	return apierr.New(apierr.BadModel, err, "model %q changed while being read", f.Name).
		WithHint("retry when the file is complete")
}

// ModelError gives an error of epmodel a class: damage in the bytes is the model's fault.
func (f Files) ModelError(err error) error {
	var format *epmodel.FormatError
	switch {
	case errors.As(err, &format):
		said := *format
		if said.File == f.Name {
			said.File = "" // the error begins with the name already
		}
		e := apierr.New(apierr.BadModel, &said, "model %q", f.Name).WithFact("file", format.File).
			WithFact("field", format.Field).WithFact("offset", fmt.Sprint(format.Offset))
		e.Err = err
		return e
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return apierr.New(apierr.ClassOf(err), err, "model %q", f.Name)
	}
	return apierr.New(apierr.BadModel, err, "model %q", f.Name)
}

func (f Files) missing(locations []string) (missing []string) {
	for _, l := range locations {
		if f.External[l] == nil {
			missing = append(missing, l)
		}
	}
	return missing
}

func (f Files) open(sums *Sums) func(location string) (epmodel.Source, error) {
	return func(location string) (epmodel.Source, error) {
		file := f.External[location]
		if file == nil {
			return nil, fmt.Errorf("external data %q: %w", location, fs.ErrNotExist)
		}
		return sums.source(file)
	}
}

// FreeDimensions returns the names of the open dimensions of the model's inputs.
func FreeDimensions(m *epmodel.Model) []string {
	seen := make(map[string]bool)
	for _, in := range m.Inputs {
		for _, d := range in.Shape {
			if d.Param != "" {
				seen[d.Param] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// Sums hashes ranges of files of several models, each range once, because the members of a group
// often have their weights in one file. The zero value and nil remember no sums, and trust the
// stamps of files, so use them only for files that no client can write. Sums is not safe for
// concurrent use.
type Sums struct {
	now   func() time.Time // nil: the stamp of every file is trusted
	known map[fileRange][32]byte
}

type fileRange struct {
	file   cas.Stamp
	off, n int64
}

type stamped struct {
	epmodel.Source
	stamp cas.Stamp
}

// DigestAt returns the digest of a model with its external data, all in the directory of the graph.
func (s *Sums) DigestAt(ctx context.Context, m *epmodel.Model, graph string) (cas.Digest, error) {
	var open []*os.File
	defer func() {
		for _, f := range open {
			_ = f.Close() // opened for reading, so no data can be lost
		}
	}()
	source := func(path string) (epmodel.Source, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		open = append(open, f)
		return s.source(f)
	}
	src, err := source(graph)
	if err != nil {
		return cas.Digest{}, err
	}
	d, err := epmodel.Digest(ctx, m, src, func(location string) (epmodel.Source, error) {
		return source(filepath.Join(filepath.Dir(graph), filepath.FromSlash(location)))
	}, s.sumRange)
	return cas.Digest(d), err
}

// source returns f as a source for hashing. Sums of a file that was changed a moment ago are not
// remembered, because its stamp may not show a further change.
func (s *Sums) source(f *os.File) (epmodel.Source, error) {
	src, err := epmodel.FileSource(f)
	if err != nil || s == nil {
		return src, err
	}
	stamp, err := cas.StampOf(f)
	if err != nil {
		return nil, err
	}
	if s.now != nil && !filestamp.LeftAlone(s.now(), stamp) {
		return src, nil
	}
	return stamped{src, stamp}, nil
}

// sumRange is an epmodel.Sum that remembers its results.
func (s *Sums) sumRange(ctx context.Context, r io.ReaderAt, off, n int64) ([32]byte, error) {
	file, ok := r.(stamped)
	if s == nil || !ok {
		return Sum(ctx, r, off, n)
	}
	key := fileRange{file.stamp, off, n}
	if d, ok := s.known[key]; ok {
		return d, nil
	}
	d, err := Sum(ctx, file.Source, off, n)
	if err == nil {
		if s.known == nil {
			s.known = make(map[fileRange][32]byte)
		}
		s.known[key] = d
	}
	return d, err
}

// Sum is an epmodel.Sum that remembers nothing.
func Sum(ctx context.Context, r io.ReaderAt, off, n int64) ([32]byte, error) {
	d, err := cas.Sum(ctx, r, off, n)
	return [32]byte(d), err
}
