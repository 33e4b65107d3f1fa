package packing

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

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

// Copies are the unpacked forms of blobs.
type Copies struct {
	fs     cas.FS
	dir    string
	apart  bool
	stamps cas.StampBook
	log    *slog.Logger

	opened  atomic.Pointer[cas.Store] // nil until something is unpacked
	opening sync.Mutex                // held while it is opened
}

// open opens the store of the unpacked forms, or makes it.
func (c *Copies) open() (*cas.Store, error) {
	if open := c.Store(); open != nil {
		return open, nil
	}
	c.opening.Lock()
	defer c.opening.Unlock()
	if open := c.Store(); open != nil {
		return open, nil
	}
	open, err := cas.Open(c.dir, cas.Options{FS: c.fs, Stamps: c.stamps, Volatile: true})
	if err != nil {
		return nil, err
	}
	c.opened.Store(open)
	return open, nil
}

// Store returns the store of the unpacked forms, nil while nothing has been unpacked.
func (c *Copies) Store() *cas.Store { return c.opened.Load() }

// Folder is that of the unpacked forms, absolute. apart: it is on another file system than the whole ones.
func (c *Copies) Folder() (path string, apart bool) { return c.dir, c.apart }

// Each calls fn for every unpacked form that takes room on the store's own file system, with its bytes on disk.
func (c *Copies) Each(ctx context.Context, fn func(d cas.Digest, disk int64) error) error {
	open := c.Store()
	if open == nil || c.apart {
		return nil
	}
	return open.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		disk, err := cas.DiskBytesIn(c.dir, d)
		if err != nil {
			return nil //nolint:nilerr // it has just gone
		}
		return fn(d, disk)
	})
}

// Stamp is the stamp of a blob's unpacked form, from memory.
func (c *Copies) Stamp(d cas.Digest) (cas.Stamp, bool) {
	open := c.Store()
	if open == nil {
		return cas.Stamp{}, false
	}
	return open.Stamp(d)
}

// Check drops an unpacked form whose bytes are not what they were: it is made again when it is needed.
func (c *Copies) Check(ctx context.Context, d cas.Digest) {
	open := c.Store()
	if open == nil || !open.Has(d) {
		return
	}
	if err := open.Check(ctx, d); Broken(err) {
		c.log.Warn("unpacked blob dropped", "digest", d.String(), "why", err)
		if err := open.Remove(d); err != nil && !errors.Is(err, cas.ErrNotFound) {
			c.log.Error("unpacked blob not dropped", "digest", d.String(), "error", err)
		}
	}
}

// Open gives a descriptor of a blob whose bytes were checked, unpacking it if need be. The caller closes it. Errors are cas.ErrNotFound, those of
// which Lost tells, and the system's.
func (s *Store) Open(ctx context.Context, d cas.Digest) (f *os.File, err error) {
	whole := func() error {
		f, err = s.whole.Open(ctx, d)
		return err
	}
	err = s.asItIs(d, whole, func() error {
		if err := s.Unpack(ctx, d, nil, nil); err != nil {
			return err
		}
		store, _, err := s.Serving(d) // it may have become whole meanwhile
		if err == nil {
			f, err = store.Open(ctx, d)
		}
		return err
	})
	return f, err
}

const attempts = 3 // of an operation, where blobs change their forms meanwhile

// asItIs calls whole, and packed if a blob is not whole. Either may find nothing because the blob has just got another form, or another container,
// or its copy has gone: then it looks once more.
func (s *Store) asItIs(d cas.Digest, whole, packed func() error) error {
	for attempt := 1; ; attempt++ {
		err := whole()
		if !errors.Is(err, cas.ErrNotFound) {
			return err
		}
		if s.shelf.Stands(d) {
			err = packed()
		} else if !s.whole.Has(d) {
			return err
		}
		if !errors.Is(err, cas.ErrNotFound) || attempt == attempts {
			return err
		}
	}
}

// CopyTo writes a blob, whole or packed, into an empty file, and verifies it on the way. Errors are
// those of Open, and of writing.
func (s *Store) CopyTo(
	ctx context.Context, d cas.Digest, f *os.File, progress func(done, total int64),
) error {
	whole := func() error {
		from, _, err := s.unverified(d)
		if err != nil {
			return err
		}
		defer from.Close() // only read from
		return dedupe.CopyVerified(ctx, from, d, f, progress)
	}
	return s.asItIs(d, whole, func() error { return s.rebuildInto(ctx, d, f, progress) })
}

// Verify is for a blob in whichever form: it looks at stamps, and hashes where they do not hold. Of a packed one it reads
// the recipe and verifies the containers, which does not prove that the one goes with the others: Check does.
func (s *Store) Verify(ctx context.Context, d cas.Digest) error {
	return s.asItIs(d, func() error { return s.whole.Verify(ctx, d) }, func() error { return s.verifyPacked(ctx, d) })
}

func (s *Store) verifyPacked(ctx context.Context, d cas.Digest) error {
	r, _, proven, err := s.recipe(d)
	if err == nil && r.Frames != nil && !proven { // its literals are in the recipe's file, which has no digest
		err = s.proveRecipe(ctx, d)
	}
	if err != nil {
		return err
	}
	for _, container := range r.Containers {
		if err := s.whole.Verify(ctx, container.Digest); err != nil {
			return &dedupe.ContainerError{Digest: container.Digest, Err: err}
		}
	}
	return nil
}

// Check reads every byte of a blob, whatever stamps say; a packed one's as its recipe gives them.
func (s *Store) Check(ctx context.Context, d cas.Digest) error {
	return s.asItIs(d, func() error { return s.whole.Check(ctx, d) }, func() error { return s.proveRecipe(ctx, d) })
}

// Broken tells that an error is about bytes that are not what they should be, of a blob, a container or a recipe.
func Broken(err error) bool {
	var format *dedupe.FormatError
	return cas.Unsound(err) || errors.As(err, &format)
}

// Lost tells that an error is about something that is not there, or is broken, or perhaps a container that is.
func Lost(err error) bool {
	var container *dedupe.ContainerError
	return Broken(err) || errors.Is(err, cas.ErrNotFound) || errors.As(err, &container)
}

// Damage is a blob, or a recipe, that is no good.
type Damage struct {
	Digest cas.Digest
	Recipe bool // the recipe of that blob; else its whole form
	Why    string
}

// DamageOf finds out what keeps a blob from being served: its whole form, or where it is packed its recipe or containers,
// of which one that is missing counts as well. What is missing without being packed is not in the list. What was verified a moment ago
// is not hashed again.
func (s *Store) DamageOf(ctx context.Context, d cas.Digest) (out []Damage) {
	err := s.whole.Verify(ctx, d)
	if !errors.Is(err, cas.ErrNotFound) || !s.shelf.Stands(d) {
		if cas.Unsound(err) {
			out = append(out, Damage{Digest: d, Why: err.Error()})
		}
		return out
	}
	p, _ := s.shelf.Has(d) // of one that cannot be read, none
	for _, container := range p.Containers {
		err := s.whole.Verify(ctx, container.Digest)
		if size, _ := s.whole.Size(container.Digest); err == nil && size != container.Size {
			out = append(out, Damage{d, true, fmt.Sprintf("the recipe says that container %s has %d bytes, and it has %d", container.Digest, container.Size, size)})
		}
		if Lost(err) {
			out = append(out, Damage{Digest: container.Digest, Why: "a container is no good: " + err.Error()})
		}
	}
	if len(out) > 0 {
		return out
	}
	// All containers are sound: what does not come out right is the recipe's doing.
	if err := s.Check(ctx, d); Lost(err) {
		out = append(out, Damage{d, true, "the recipe is no good: " + err.Error()})
	}
	return out
}
