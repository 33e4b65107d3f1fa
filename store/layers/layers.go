// Package layers serves builds from read-only stores below the daemon's own, through the views in
// these. It neither changes nor copies a layer, and keeps the builds' records in memory: see Set. A
// Set is safe for concurrent use.
package layers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/store/views"
)

// Source is a layer with the function that reads its builds.
type Source struct {
	Path string
	List string // its file that lists the builds; replaced when they change
	// Read returns the builds, with Layer set, and for each refused build the reason.
	Read func() (builds []index.Build, refused []string, err error)
}

// State is the state of a layer.
type State struct {
	Path    string
	Builds  uint64
	Bytes   int64    // of the builds' files
	Err     error    // why the whole layer is not used
	Refused []string // builds that are not used, with the reason
}

// Set has the builds of some layers. Of equal builds in several, the first layer's is used.
type Set struct {
	Memos *index.Memos // remembers verified files; set before View is called

	all      atomic.Pointer[[]Source]
	log      *slog.Logger
	read     atomic.Pointer[contents]
	reading  sync.Mutex // held while the layers are read
	hashing  keyed.Locks[index.BuildID]
	verified sync.Map // index.BuildID -> mark of the verified files
}

// contents has the builds of the layers at the last read.
type contents struct {
	marks     []string // of the lists; "": missing
	states    []State
	byID      map[index.BuildID]index.Build
	byRequest map[index.RequestKey][]index.Build
}

// New reads the layers. If one cannot be read, the others are still used.
func New(all []Source, log *slog.Logger) *Set {
	s := &Set{log: log}
	s.Use(all)
	return s
}

// Use replaces the layers by others. Views in use stay valid.
func (s *Set) Use(all []Source) {
	s.reading.Lock()
	defer s.reading.Unlock()
	s.all.Store(&all)
	s.read.Store(s.readAll(all, marksOf(all)))
}

// marksOf returns the marks of the lists of layers.
func marksOf(all []Source) []string {
	now := make([]string, len(all))
	for i, one := range all {
		now[i], _ = views.MarkOf(filepath.Join(one.Path, one.List))
	}
	return now
}

// States returns the state of each layer.
func (s *Set) States() []State { return s.read.Load().states }

// Follow reads the layers again if one was mounted, unmounted or replaced. Otherwise it only checks
// the stamp of each list.
func (s *Set) Follow() {
	if all := *s.all.Load(); len(all) == 0 || slices.Equal(s.read.Load().marks, marksOf(all)) {
		return
	}
	s.reading.Lock()
	defer s.reading.Unlock()
	all := *s.all.Load()
	if now := marksOf(all); !slices.Equal(s.read.Load().marks, now) {
		s.read.Store(s.readAll(all, now))
	}
}

func (s *Set) readAll(all []Source, marks []string) *contents {
	c := &contents{marks: marks, byID: make(map[index.BuildID]index.Build),
		byRequest: make(map[index.RequestKey][]index.Build)}
	for _, one := range all {
		builds, refused, err := one.Read()
		state := State{Path: one.Path, Err: err, Refused: refused}
		if err != nil || len(refused) > 0 {
			s.log.Warn("builds of a layer are not used", "layer", one.Path, "error", err, "builds",
				len(refused))
		}
		for _, b := range builds {
			if _, there := c.byID[b.ID]; there {
				continue
			}
			c.byID[b.ID] = b
			for _, k := range b.Keys() {
				c.byRequest[k] = append(c.byRequest[k], b)
			}
			state.Builds++
			for _, f := range b.Files {
				state.Bytes += f.Size
			}
		}
		c.states = append(c.states, state)
	}
	return c
}

// Of implements index.Lower.
func (s *Set) Of(k index.RequestKey) []index.Build { return s.read.Load().byRequest[k] }

// Get implements index.Lower.
func (s *Set) Get(id index.BuildID) (index.Build, bool) {
	b, ok := s.read.Load().byID[id]
	return b, ok
}

// Each implements index.Lower.
func (s *Set) Each(fn func(index.Build) error) error {
	c := s.read.Load()
	for _, id := range slices.SortedFunc(maps.Keys(c.byID), compareIDs) {
		if err := fn(c.byID[id]); err != nil {
			return err
		}
	}
	return nil
}

func compareIDs(a, b index.BuildID) int { return bytes.Compare(a[:], b[:]) }

// Among calls fn with the builds of each, which are in order of ids, merged with the layers' builds
// whose ids follow after.
func (s *Set) Among(after index.BuildID, each func(func(index.Build) error) error,
	fn func(index.Build) error) error {
	var below []index.Build
	_ = s.Each(func(b index.Build) error {
		if compareIDs(b.ID, after) > 0 {
			below = append(below, b)
		}
		return nil
	}) // Each returns only errors of the function
	until := func(id *index.BuildID) error {
		for len(below) > 0 && (id == nil || compareIDs(below[0].ID, *id) < 0) {
			if err := fn(below[0]); err != nil {
				return err
			}
			below = below[1:]
		}
		return nil
	}
	err := each(func(b index.Build) error {
		if err := until(&b.ID); err != nil {
			return err
		}
		return fn(b)
	})
	if err != nil {
		return err
	}
	return until(nil)
}

// Keep implements index.Lower: the states of a build are kept while a layer is missing that may
// have it.
func (s *Set) Keep(id index.BuildID) bool {
	c := s.read.Load()
	_, there := c.byID[id]
	return there || slices.ContainsFunc(c.states, func(one State) bool { return one.Err != nil })
}

// View returns the layer's view of a build. It hashes the files once for each boot and mount, and
// calls verifying before.
func (s *Set) View(ctx context.Context, b *index.Build, verifying func()) (*views.View, error) {
	v, mark, err := views.InLayer(b.Layer, b)
	if err != nil {
		return nil, asNotFound(err)
	}
	if known, _ := s.verified.Load(b.ID); known == mark {
		return v, nil
	}
	leave, err := s.hashing.Lock(ctx, b.ID)
	if err != nil {
		return nil, err
	}
	defer leave()
	key := append([]byte("layer\x00"), b.ID[:]...)
	if known, _ := s.Memos.Get(key); string(known) != mark {
		verifying()
		if err := s.Hash(ctx, b); err != nil {
			return nil, err
		}
		if _, after, err := views.InLayer(b.Layer, b); err != nil {
			return nil, asNotFound(err)
		} else if after != mark {
			return nil, fmt.Errorf("layer %s changed while it was read", b.Layer)
		}
		if err := s.Memos.Save(key, []byte(mark)); err != nil {
			s.log.Warn("cannot record that a build of a layer was verified", "error", err)
		}
	}
	s.verified.Store(b.ID, mark)
	return v, nil
}

// Hash hashes the files of a build.
func (s *Set) Hash(ctx context.Context, b *index.Build) error {
	dir := views.LayerDir(b.Layer, b)
	for _, f := range b.Files {
		got, err := cas.SumFile(ctx, filepath.Join(dir, filepath.FromSlash(f.Name)))
		if err == nil && got != f.Digest {
			err = &cas.CorruptError{Digest: f.Digest, Got: got}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name, asNotFound(err))
		}
	}
	return nil
}

func asNotFound(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", cas.ErrNotFound, err)
	}
	return err
}

// WhyNot returns why a build could not be served, and whether it is damaged. If its layer is not
// mounted, it is only missing.
func (s *Set) WhyNot(b *index.Build, cause error) (why string, damaged bool) {
	s.Follow()
	if now, there := s.Get(b.ID); !there || now.Layer != b.Layer {
		return fmt.Sprintf("layer %s, which had the build, was removed", b.Layer), false
	}
	// errors of a damaged file system
	broken := errors.Is(cause, unix.EUCLEAN) || errors.Is(cause, unix.EBADMSG)
	if errors.Is(cause, fs.ErrPermission) || !cas.IsUnsound(cause) &&
		!errors.Is(cause, cas.ErrNotFound) && !broken {
		return fmt.Sprintf("the build in layer %s cannot be served: %v", b.Layer, cause), false
	}
	return fmt.Sprintf("the build in layer %s is damaged: %v", b.Layer, cause), true
}
