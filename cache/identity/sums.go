package identity

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/witness"
)

// Sums hashes ranges of files of several models, each once: the members of a group often have their
// weights in one file. The zero value and nil remember nothing, and believe the stamps of files that
// no client can write. One goroutine uses it.
type Sums struct {
	now   func() time.Time // nil: every file's stamp is believed
	known map[rangeOf][32]byte
}

type rangeOf struct {
	file   cas.Stamp
	off, n int64
}

// stamped is a source whose file is known.
type stamped struct {
	epmodel.Source
	stamp cas.Stamp
}

// DigestAt returns the digest of a model with its external data, all in the folder of the graph.
func (s *Sums) DigestAt(ctx context.Context, m *epmodel.Model, graph string) (cas.Digest, error) {
	var open []*os.File
	defer func() {
		for _, f := range open {
			_ = f.Close() // opened for reading only: nothing can be lost
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
	}, s.of)
	return cas.Digest(d), err
}

// source opens a file for of. The sums of one that was changed a moment ago are not remembered,
// because its times do not tell enough.
func (s *Sums) source(f *os.File) (epmodel.Source, error) {
	src, err := epmodel.FileSource(f)
	if err != nil || s == nil {
		return src, err
	}
	stamp, err := cas.StampOf(f)
	if err != nil {
		return nil, err
	}
	if s.now != nil && !witness.LeftAlone(s.now(), stamp) {
		return src, nil
	}
	return stamped{src, stamp}, nil
}

// of is an epmodel.Sum.
func (s *Sums) of(ctx context.Context, r io.ReaderAt, off, n int64) ([32]byte, error) {
	file, ok := r.(stamped)
	if s == nil || !ok {
		return Sum(ctx, r, off, n)
	}
	key := rangeOf{file.stamp, off, n}
	if d, ok := s.known[key]; ok {
		return d, nil
	}
	d, err := Sum(ctx, file.Source, off, n)
	if err == nil {
		if s.known == nil {
			s.known = make(map[rangeOf][32]byte)
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
