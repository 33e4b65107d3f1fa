package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/dedupe/match"
)

// The epcached side: package dedupe on files, as the store uses it.

const mostCandidates = 8

// mostSyncing is how many files may be on their way to the disk while further
// ones are taken in; taking in ends when the last has come there. It is the same
// for the chunk stores.
const mostSyncing = 8

// mostCopying is how many blobs may be on their way into the store while further
// files are scanned. Until they are there, others are compared with where they come from.
const mostCopying = 4

// pack is worth a recipe if it saves as much.
const leastSaved = 64 << 10

type extentStore struct {
	dir      string
	sketches map[cas.Digest]match.Sketch
	names    []named
	// of blobs into the store, whose digests are known; no more than mostCopying at a time
	copying errgroup.Group
	syncing errgroup.Group // of files; no more than mostSyncing at a time
	stored  int64          // bytes of objects and recipes

	mu sync.Mutex // guards outside, and is held while what it names is opened
	// blobs that are still being copied into the store; or that were there before
	outside map[cas.Digest]outside
}

// outside is where the bytes of a blob are until its object is written.
type outside struct {
	path     string
	literals *match.Plan // of the file at path; nil: all of it
}

func (o outside) open() (*blobFile, error) {
	f, err := os.Open(o.path)
	if err != nil {
		return nil, err
	}
	file, err := dedupe.NewFile(f)
	if err != nil {
		return nil, err
	}
	if o.literals == nil {
		return &blobFile{file, file}, nil
	}
	return &blobFile{o.literals.Literals(file), file}, nil
}

// blobFile is a blob that is read from an open file.
type blobFile struct {
	dedupe.Source
	io.Closer
}

type named struct {
	Digest cas.Digest
	Path   string
}

func (s *extentStore) all() iter.Seq2[cas.Digest, match.Sketch] {
	return func(yield func(cas.Digest, match.Sketch) bool) {
		for d, k := range s.sketches {
			if !yield(d, k) {
				return
			}
		}
	}
}

func (s *extentStore) object(d cas.Digest) string {
	return filepath.Join(s.dir, "objects", d.String())
}

// open opens a blob, which is an io.Closer.
func (s *extentStore) open(d cas.Digest) (dedupe.Source, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o, ok := s.outside[d]; ok {
		return o.open()
	}
	f, err := os.Open(s.object(d))
	if err != nil {
		return nil, err
	}
	return dedupe.NewFile(f)
}

// extentsIn takes everything in from outside.
func extentsIn(c corpus, store string) ([]int64, error) {
	return share(c, store, func(s *extentStore, f fileInfo) error {
		return s.take(c.path(f), f.Path, cas.Digest{})
	})
}

// publish puts everything into the store as it is, as the daemon does when a build comes.
func publish(c corpus, store string) error {
	s, err := newStore(store)
	if err != nil {
		return err
	}
	for _, f := range c.files() {
		in, err := os.Open(c.path(f))
		if err != nil {
			return err
		}
		src, err := dedupe.NewFile(in)
		if err != nil {
			return err
		}
		d, err := s.store(context.Background(), src)
		if err != nil {
			return err
		}
		s.names = append(s.names, named{d, f.Path})
		if err := src.Close(); err != nil {
			return err
		}
	}
	return errors.Join(s.saveNames(), s.syncing.Wait())
}

// sharedIn finds what published blobs share and packs them, as the daemon does afterwards: their
// digests are known.
func sharedIn(c corpus, store string) ([]int64, error) {
	before := &extentStore{dir: store}
	if err := before.loadNames(); err != nil {
		return nil, err
	}
	next := 0
	return share(c, store, func(s *extentStore, f fileInfo) error {
		d := before.names[next].Digest
		next++
		return s.take(s.object(d), f.Path, d)
	})
}

func newStore(store string) (*extentStore, error) {
	s := &extentStore{dir: store, sketches: map[cas.Digest]match.Sketch{},
		outside: map[cas.Digest]outside{}}
	s.syncing.SetLimit(mostSyncing)
	s.copying.SetLimit(mostCopying)
	for _, dir := range []string{"objects", "recipes"} {
		if err := os.MkdirAll(filepath.Join(store, dir), 0o755); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func share(c corpus, store string, take func(*extentStore, fileInfo) error) ([]int64, error) {
	s, err := newStore(store)
	if err != nil {
		return nil, err
	}
	var stored []int64
	for _, a := range c.Artefacts {
		before := s.stored
		for _, f := range a.Files {
			if err := take(s, f); err != nil {
				return nil, fmt.Errorf("%s: %w", f.Path, err)
			}
		}
		stored = append(stored, s.stored-before)
	}
	return stored, errors.Join(s.copying.Wait(), s.syncing.Wait(), s.saveNames())
}

func (s *extentStore) saveNames() error {
	names, err := json.Marshal(s.names)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.dir, "names"), names, 0o644)
}

func (s *extentStore) loadNames() error {
	b, err := os.ReadFile(filepath.Join(s.dir, "names"))
	if err != nil {
		return err
	}
	return json.Unmarshal(b, &s.names)
}

// take takes in the file at path. Its digest is zero if it is not in the store yet.
func (s *extentStore) take(path, name string, known cas.Digest) error {
	ctx := context.Background()
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	target, err := dedupe.NewFile(f)
	if err != nil {
		return err
	}
	defer target.Close()
	var open []dedupe.Source
	defer func() {
		for _, src := range open {
			src.(io.Closer).Close()
		}
	}()
	digest := known
	if known.IsZero() {
		if digest, err = cas.Sum(ctx, target, 0, target.Size()); err != nil {
			return err
		}
	}
	s.names = append(s.names, named{digest, name})
	if s.taken(digest) {
		return nil
	}
	plan, err := match.Find(ctx, target,
		func(_ context.Context, sketch match.Sketch) ([]match.Candidate, error) {
			var candidates []match.Candidate
			for _, d := range match.Candidates(sketch, s.all(), nil, mostCandidates) {
				src, err := s.open(d)
				if err != nil {
					return nil, err
				}
				open = append(open, src)
				candidates = append(candidates, match.Candidate{Digest: d, Source: src})
			}
			return candidates, nil
		})
	if err != nil {
		return err
	}
	if plan.Size-plan.LiteralSize() < leastSaved {
		s.sketches[digest] = plan.Sketch
		s.stored += plan.Size
		if known.IsZero() {
			s.copy(digest, outside{path: path}, nil)
		}
		return nil
	}
	remove := func() error { return nil }
	if !known.IsZero() {
		remove = func() error { return os.Remove(path) } // takes a while for large files
	}
	return s.pack(ctx, plan, target, path, digest, remove)
}

// pack writes the recipe of a blob, and what it needs of its own. Then it is done with the file at
// path.
func (s *extentStore) pack(ctx context.Context, plan *match.Plan, target dedupe.Source, path string,
	digest cas.Digest, done func() error) error {
	literals := plan.Literals(target)
	size := literals.Size()
	var literalDigest cas.Digest
	if size > 0 {
		var err error
		if literalDigest, err = cas.Sum(ctx, literals, 0, size); err != nil {
			return err
		}
		s.stored += size
		switch {
		case size > target.Size()/2: // nearly the same
			s.sketches[literalDigest] = plan.Sketch
		case size > leastSaved:
			if s.sketches[literalDigest], err = match.SketchOf(ctx, literals); err != nil {
				return err
			}
		}
	}
	recipe, err := plan.Recipe(digest, literalDigest)
	if err != nil {
		return err
	}
	b, err := recipe.Encode()
	if err != nil {
		return err
	}
	s.stored += int64(len(b))
	if size > 0 {
		s.copy(literalDigest, outside{path, plan}, done)
	} else {
		s.copying.Go(done)
	}
	return s.write(filepath.Join(s.dir, "recipes", digest.String()), func(f *os.File) error {
		_, err := f.Write(b)
		return err
	})
}

// copy has a blob whose digest is known copied to where it belongs, while further files are taken
// in; then done, which may be nil, is called.
func (s *extentStore) copy(d cas.Digest, from outside, done func() error) {
	s.mu.Lock()
	s.outside[d] = from
	s.mu.Unlock()
	s.copying.Go(func() error {
		in, err := from.open()
		if err != nil {
			return err
		}
		defer in.Close()
		err = s.write(s.object(d), func(f *os.File) error {
			_, err := copySteps(f, io.NewSectionReader(in, 0, in.Size()), in.Size())
			return err
		})
		if err != nil {
			return err
		}
		s.mu.Lock()
		delete(s.outside, d)
		s.mu.Unlock()
		if done != nil {
			err = done()
		}
		return err
	})
}

// copySteps copies the first n bytes of in to the empty file out, as package
// dedupe does: without copy_file_range.
func copySteps(out *os.File, in io.Reader, n int64) (int64, error) {
	cas.Preallocate(out, n)
	return io.CopyBuffer(struct{ io.Writer }{out}, io.LimitReader(in, n),
		make([]byte, cas.WriteStep))
}

// store writes a blob while it is hashed.
func (s *extentStore) store(ctx context.Context, src dedupe.Source) (d cas.Digest, err error) {
	if src.Size() == 0 {
		return d, nil
	}
	path := filepath.Join(s.dir, "objects", "new")
	err = s.write(path, func(f *os.File) error {
		cas.Preallocate(f, src.Size())
		var err error
		d, err = cas.Sum(ctx, &writingReader{src, f}, 0, src.Size())
		return err
	})
	if err != nil {
		return d, err
	}
	return d, os.Rename(path, s.object(d))
}

// writingReader writes what is read through it.
type writingReader struct {
	from io.ReaderAt
	to   io.WriterAt
}

// ReadAt is io.ReaderAt.
func (w *writingReader) ReadAt(p []byte, off int64) (int, error) {
	n, err := w.from.ReadAt(p, off)
	if _, werr := cas.WriteInSteps(w.to, p[:n], off); werr != nil {
		return n, werr
	}
	return n, err
}

// write makes a file, and syncs it while the next ones are taken in; sync waits for the last.
func (s *extentStore) write(path string, fill func(*os.File) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := fill(f); err != nil {
		return errors.Join(err, f.Close())
	}
	s.syncing.Go(func() error { return errors.Join(f.Sync(), f.Close()) })
	return nil
}

// extentsOut restores everything; trusted is what epcached does where the stamps of the bases
// hold.
func extentsOut(c corpus, store, into string, trusted bool) error {
	s := &extentStore{dir: store}
	if err := s.loadNames(); err != nil {
		return err
	}
	for _, n := range s.names {
		if err := s.restore(n.Digest, filepath.Join(into, n.Path), trusted); err != nil {
			return fmt.Errorf("%s: %w", n.Path, err)
		}
	}
	return nil
}

func (s *extentStore) restore(digest cas.Digest, path string, trusted bool) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	if f, err := os.Open(s.object(digest)); err == nil {
		defer f.Close()
		return copyWhole(f, out, digest, trusted)
	}
	recipe, err := s.recipe(digest)
	if err != nil {
		return err
	}
	return dedupe.Apply(context.Background(), recipe, s.open, out,
		dedupe.ApplyOptions{Trusted: trusted})
}

// recipe reads that of a packed blob.
func (s *extentStore) recipe(digest cas.Digest) (*dedupe.Recipe, error) {
	b, err := os.ReadFile(filepath.Join(s.dir, "recipes", digest.String()))
	if err != nil {
		return nil, err
	}
	return dedupe.DecodeRecipe(b)
}

// taken reports whether a blob was taken in before.
func (s *extentStore) taken(d cas.Digest) bool {
	_, whole := s.sketches[d]
	_, err := os.Stat(filepath.Join(s.dir, "recipes", d.String()))
	return whole || err == nil
}

func copyWhole(in, out *os.File, digest cas.Digest, trusted bool) error {
	n, err := io.Copy(out, in)
	if err != nil || trusted {
		return err
	}
	got, err := cas.Sum(context.Background(), out, 0, n)
	if err == nil && got != digest {
		return &cas.CorruptError{Digest: digest, Got: got}
	}
	return err
}
