package store_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cas/crashfs"
	"github.com/epcached/epcached/index"
)

var allFaults = flag.Bool("faults.all", false,
	"meet each call with each error, not with one of them")

// faulty is a file system of which all calls of one label fail while it is armed.
type faulty struct {
	*crashfs.FS
	root string

	mu    sync.Mutex // guards all below
	seen  map[string]bool
	label string // of the calls that fail; "": none
	err   error
	hits  int
}

// hit records a call, and returns the error that it fails with.
func (f *faulty) hit(op, path string) error {
	rel, err := filepath.Rel(filepath.Join(f.root, "state"), path)
	if err != nil {
		return nil
	}
	place, rest, _ := strings.Cut(rel, "/")
	if strings.HasPrefix(rest, "incoming") {
		place += " incoming"
	}
	label := op + " " + place
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen[label] = true
	if label != f.label {
		return nil
	}
	f.hits++
	return &os.PathError{Op: op, Path: path, Err: f.err}
}

func (f *faulty) arm(label string, err error) (hits int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	hits, f.label, f.err, f.hits = f.hits, label, err, 0
	return hits
}

func try[T any](f *faulty, op, path string, do func() (T, error)) (T, error) {
	if err := f.hit(op, path); err != nil {
		return *new(T), err
	}
	return do()
}

func try0(f *faulty, op, path string, do func() error) error {
	if err := f.hit(op, path); err != nil {
		return err
	}
	return do()
}

func (f *faulty) Mkdir(path string) error {
	return try0(f, "mkdir", path, func() error { return f.FS.Mkdir(path) })
}

func (f *faulty) ReadDir(path string) ([]string, error) {
	return try(f, "readdir", path, func() ([]string, error) { return f.FS.ReadDir(path) })
}

func (f *faulty) Create(path string) (*os.File, error) {
	return try(f, "create", path, func() (*os.File, error) { return f.FS.Create(path) })
}

func (f *faulty) Open(path string) (*os.File, error) {
	return try(f, "open", path, func() (*os.File, error) { return f.FS.Open(path) })
}

func (f *faulty) OpenWrite(path string) (*os.File, error) {
	return try(f, "open to write", path, func() (*os.File, error) { return f.FS.OpenWrite(path) })
}

func (f *faulty) ReadAt(open *os.File, p []byte, off int64) (int, error) {
	return try(f, "read", open.Name(), func() (int, error) { return f.FS.ReadAt(open, p, off) })
}

func (f *faulty) WriteAt(open *os.File, p []byte, off int64) (int, error) {
	return try(f, "write", open.Name(), func() (int, error) { return f.FS.WriteAt(open, p, off) })
}

func (f *faulty) Truncate(open *os.File, size int64) error {
	return try0(f, "truncate", open.Name(), func() error { return f.FS.Truncate(open, size) })
}

func (f *faulty) Allocate(open *os.File, size int64) error {
	return try0(f, "allocate", open.Name(), func() error { return f.FS.Allocate(open, size) })
}

func (f *faulty) Chmod(open *os.File, mode os.FileMode) error {
	return try0(f, "chmod", open.Name(), func() error { return f.FS.Chmod(open, mode) })
}

// Sync that fails loses what was not synced, and the next one succeeds without writing it.
func (f *faulty) Sync(open *os.File) error {
	if err := f.hit("sync", open.Name()); err != nil {
		f.FS.FailAt(f.FS.Steps()+1, err)
	}
	return f.FS.Sync(open)
}

func (f *faulty) Link(from, to string) error {
	return try0(f, "link", to, func() error { return f.FS.Link(from, to) })
}

func (f *faulty) LinkAt(from string, dir *os.File, name string) error {
	return try0(f, "link", dir.Name(), func() error { return f.FS.LinkAt(from, dir, name) })
}

func (f *faulty) UnlinkAt(dir *os.File, name string) error {
	return try0(f, "unlink", dir.Name(), func() error { return f.FS.UnlinkAt(dir, name) })
}

func (f *faulty) Rename(from, to string) error {
	return try0(f, "rename", to, func() error { return f.FS.Rename(from, to) })
}

func (f *faulty) Remove(path string) error {
	return try0(f, "remove", path, func() error { return f.FS.Remove(path) })
}

func (f *faulty) SyncDir(path string) error {
	return try0(f, "sync directory", path, func() error { return f.FS.SyncDir(path) })
}

// faultyStore is a store on such a file system.
func faultyStore(t *testing.T) (*history, *faulty) {
	f := &faulty{seen: make(map[string]bool)}
	h := newHistory(t, func(under cas.FS) cas.FS {
		f.FS = under.(*steps).FS
		return f
	})
	f.root = h.root
	return h, f
}

// script is what is done while calls fail: each kind of change there is.
var script = []struct {
	name string
	do   func(*history, *rand.Rand) error
}{
	{"publish", (*history).publish},
	{"publish alike", func(h *history, r *rand.Rand) error { return h.publishLike(r, false) }},
	{"pack", (*history).pack},
	{"view", (*history).view},
	{"unpack", (*history).unpack},
	{"publish anew", func(h *history, r *rand.Rand) error { return h.publishLike(r, true) }},
	{"pin", (*history).pin},
	{"withhold", (*history).withhold},
	{"remove", (*history).remove},
	{"repair", (*history).repair},
	{"publish", (*history).publish},
	{"evict", (*history).evict},
}

// suffer does each step of the script while calls with the label fail, and then again when none
// does. It returns how many have failed.
func (h *history) suffer(f *faulty, label string, failure error) (hits int, err error) {
	unsure := make(map[index.BuildID]bool) // builds of which a change failed
	for i, step := range script {
		h.now = h.now.Add(time.Hour)
		h.ops = append(h.ops, step.name)
		f.arm(label, failure)
		failed := step.do(h, rand.New(rand.NewPCG(7, uint64(i))))
		met := f.arm("", nil)
		hits += met
		if met > 0 { // what supersedes a build is stored, also if that one cannot be removed
			if err := h.agree(unsure); err != nil {
				return hits, err
			}
		}
		clear(h.doing)
		if err := step.do(h, rand.New(rand.NewPCG(8, uint64(i)))); err != nil {
			return hits, fmt.Errorf("%s, when nothing fails any more (%v): %w", step.name,
				failed, err)
		}
		clear(h.doing)
		h.repairing = false
		if err := h.compare(h.store); err != nil {
			return hits, fmt.Errorf("after %s (%v): %w", step.name, failed, err)
		}
	}
	maps.Copy(h.doing, unsure)
	for seed := range uint64(3) {
		if err := h.crash(rand.New(rand.NewPCG(seed, 3))); err != nil {
			return hits, fmt.Errorf("after a crash: %w", err)
		}
	}
	return hits, nil
}

// agree takes what the store says of the builds of which a change failed, because either is right.
func (h *history) agree(unsure map[index.BuildID]bool) error {
	maps.Copy(unsure, h.doing)
	err := h.store.Index().Each(context.Background(), func(b index.Build) error {
		if h.facts[b.ID] == nil {
			h.facts[b.ID] = &fact{build: b}
			unsure[b.ID] = true
		}
		return nil
	})
	for id, f := range h.facts {
		if !unsure[id] {
			continue
		}
		_, found := h.store.Index().Get(id)
		f.gone = errors.Is(found, index.ErrNotFound)
		_, f.pinned = h.store.Index().Journal.Pinned(id)
		f.state = h.store.Index().Journal.StateOf(id).Name
	}
	return err
}

// While calls of one kind fail, in one place, operations may fail: nothing that was acknowledged is
// lost, and when the calls succeed again so do the operations, in the same process.
func TestStoreRecoversWithoutARestart(t *testing.T) {
	h, f := faultyStore(t)
	_, err := h.suffer(f, "", nil)
	require.NoError(t, err)
	labels := slices.Sorted(maps.Keys(f.seen))
	t.Logf("%d labels: %v", len(labels), labels)
	errs := []error{syscall.EMFILE, syscall.ENOMEM, syscall.EDQUOT, syscall.EROFS, syscall.EIO,
		syscall.ENOSPC}
	reading := errs[:2] // EIO says that the bytes are lost
	met := 0
	for i, label := range labels {
		op, _, _ := strings.Cut(label, " ")
		may := errs
		if op == "open" || op == "read" || op == "readdir" {
			may = reading
		}
		if !*allFaults {
			may = may[i%len(may):][:1]
		}
		for _, failure := range may {
			t.Run(fmt.Sprintf("%s %v", label, failure), func(t *testing.T) {
				h, f := faultyStore(t)
				hits, err := h.suffer(f, label, failure)
				require.NoError(t, err, "%d calls have failed", hits)
				if hits > 0 {
					met++
				}
			})
		}
	}
	t.Logf("%d of %d labels met", met, len(labels))
}
