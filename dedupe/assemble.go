package dedupe

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"sync"

	"github.com/epcached/epcached/cas"
)

// Assembled is a packed blob that reads as if it stood whole. Its bytes are not
// verified: whoever reads all of them hashes them, as Apply does.
type Assembled struct {
	recipe *Recipe
	open   func(cas.Digest) (Source, error)

	mu      sync.Mutex // guards sources
	sources []Source   // in the order of the recipe's containers, then its frames; nil: not opened yet
}

// Assemble gives the blob of a valid recipe as a Source. open is called at most once for each
// container, when its bytes are first needed, and must answer with a blob that stands whole: with
// cas.ErrNotFound for one that is packed. Close closes what was opened.
func Assemble(r *Recipe, open func(cas.Digest) (Source, error)) (*Assembled, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	return &Assembled{recipe: r, open: open, sources: make([]Source, r.sources())}, nil
}

// Size returns the length of the blob in bytes.
func (a *Assembled) Size() int64 { return a.recipe.Size }

// Close closes the containers that were opened and are io.Closers.
func (a *Assembled) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all error
	for i, s := range a.sources {
		if c, ok := s.(io.Closer); ok {
			all = errors.Join(all, c.Close())
		}
		a.sources[i] = nil
	}
	return all
}

// source returns an open container, after comparing its size with what the recipe says of it.
func (a *Assembled) source(i int) (Source, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.sources[i]; s != nil {
		return s, nil
	}
	if i == len(a.recipe.Containers) {
		s, err := a.recipe.Frames.open()
		if err != nil {
			return nil, err
		}
		a.sources[i] = s
		return s, nil
	}
	c := a.recipe.Containers[i]
	s, err := a.open(c.Digest)
	if err != nil {
		return nil, &ContainerError{c.Digest, err}
	}
	a.sources[i] = s
	if s.Size() != c.Size {
		return nil, &ContainerError{c.Digest, &FormatError{-1, "size", fmt.Sprintf("%d bytes, the recipe says %d", s.Size(), c.Size)}}
	}
	return s, nil
}

// ReadAt is io.ReaderAt. Errors of containers are *ContainerError.
func (a *Assembled) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read at offset %d", off)
	}
	return ReadExtents(a.recipe.Extents, p, off, a.fill)
}

// ReadExtents reads from off what extents in order of At make up; fill reads the bytes of one, from
// skip on.
func ReadExtents(
	all []Extent, p []byte, off int64, fill func(p []byte, e Extent, skip int64) error,
) (n int, err error) {
	i := sort.Search(len(all), func(i int) bool { return all[i].At+all[i].Length > off })
	for ; n < len(p) && i < len(all); i++ {
		skip := off + int64(n) - all[i].At
		part := p[n:min(int64(len(p)), int64(n)+all[i].Length-skip)]
		if err := fill(part, all[i], skip); err != nil {
			return n, err
		}
		n += len(part)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (a *Assembled) fill(p []byte, e Extent, skip int64) error {
	s, err := a.source(e.Container)
	if err != nil {
		return err
	}
	if e.Period > 0 {
		err = fillRepeated(p, s, e, skip)
	} else {
		err = ReadFull(s, p, e.From+skip)
	}
	if err != nil && e.Container < len(a.recipe.Containers) {
		return &ContainerError{a.recipe.Containers[e.Container].Digest, err}
	}
	return err
}

// fillRepeated reads at most one period from the source, and doubles what it
// has, so that neither a short nor a long period is slow.
func fillRepeated(p []byte, s Source, e Extent, skip int64) error {
	phase := skip % e.Period
	n := int(min(int64(len(p)), e.Period-phase))
	if err := ReadFull(s, p[:n], e.From+phase); err != nil {
		return err
	}
	if n == len(p) {
		return nil
	}
	rest := p[n:]
	unit := int(min(int64(len(rest)), e.Period))
	head := min(unit, int(phase)) // of the period's beginning, what has not been read yet
	if err := ReadFull(s, rest[:head], e.From); err != nil {
		return err
	}
	copy(rest[head:unit], p[:unit-head])
	for done := unit; done < len(rest); {
		done += copy(rest[done:], rest[:done])
	}
	return nil
}

// Source is a blob whose bytes do not change while it is used: a File, a
// *bytes.Reader, or an Assembled blob. ReadAt is called from several
// goroutines.
//
// Files are read in windows and not mapped: a mapping of a file that a failing
// disk cannot read, or that somebody cut, kills the process or needs
// SetPanicOnFault in every goroutine, and its pages count as the daemon's memory.
type Source interface {
	io.ReaderAt
	Size() int64
}

// ReadFull fills p from off. The end before that is io.ErrUnexpectedEOF: a
// source has the size that it states.
func ReadFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read at offset %d: %w", off+int64(n), err)
}

// File is an open file as a Source. It takes its size when it is made; store files do not change.
type File struct {
	file *os.File
	size int64
}

// NewFile returns f as a Source, which closes f when it is closed. It takes f over, also where it
// fails.
func NewFile(f *os.File) (*File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &File{f, info.Size()}, nil
}

// ReadAt is io.ReaderAt.
func (f *File) ReadAt(p []byte, off int64) (int, error) { return f.file.ReadAt(p, off) }

// Size returns the length of the file in bytes.
func (f *File) Size() int64 { return f.size }

// Close closes the file.
func (f *File) Close() error { return f.file.Close() }
