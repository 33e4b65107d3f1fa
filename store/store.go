package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/layers"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
)

// Options configure a Store, and have the functions that it calls.
type Options struct {
	FS  cas.FS // nil: the operating system's
	Log *slog.Logger
	Now func() time.Time
	// PathAccess lets every local user open shared views by path, not only by descriptor.
	PathAccess bool
	Settings   Settings
	Layers     []layers.Source // below this store, in order

	Making func(builds uint64, percent int) // called while the index is made from the manifests
	Broken func(*index.BrokenError)         // called once if the index turns out to be damaged
	Heard  func(index.Event)                // called with each event, in order

	// OnPublished is called when a build that the user uid requested is durable, before its event.
	OnPublished func(b *index.Build, uid uint32)
	OnWithheld  func(b *index.Build) // called when a build is withheld
	// Compiling reports whether a compile is under way, while which background work pauses.
	Compiling func() bool

	// Bound reports whether UserShare bounds a user's builds and pins; nil: it bounds no user.
	Bound func(uid uint32) bool
}

// Settings may change while the store is open.
type Settings struct {
	Space  SpaceOptions
	Pack   Packing
	Verify time.Duration // period of one pass of the scrub; 0: no scrub
}

// Store owns a state directory. Make one with Open or OpenReadOnly. It is safe for concurrent use.
type Store struct {
	Layers *layers.Set // below the store

	dir      string
	uid      uint32
	options  Options
	log      *slog.Logger
	now      func() time.Time
	lock     *os.File // nil if the store is read-only
	settings atomic.Pointer[Settings]

	index   *index.Index
	cas     *cas.Store
	packing *packing.Store
	views   *views.Store

	*buildGuard
	committer    *committer
	ledger       *Ledger
	collector    *Collector
	packer       *Packer
	reopenNeeded chan string
	work         sync.WaitGroup // the background work
}

// Open opens the store in dir, an absolute path, and creates it if there is none. Only one process
// can have a store open.
func Open(dir string, o Options) (*Store, error) {
	if err := makeLayout(dir); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	lock, err := lockState(dir)
	if err != nil {
		return nil, err
	}
	st := &Store{dir: dir, uid: uint32(os.Getuid()), options: o, log: o.Log, now: o.Now, lock: lock,
		ledger: newLedger(), buildGuard: newBuildGuard(), reopenNeeded: make(chan string, 1)}
	st.collector = &Collector{st: st}
	st.packer = &Packer{st: st, retryAll: make(chan struct{}, 1),
		futile: make(map[packing.Family]bool), slowly: rate.NewLimiter(scrubRate, scrubPiece)}
	st.settings.Store(&o.Settings)
	if err := st.open(); err != nil {
		return nil, errors.Join(err, st.Close())
	}
	return st, nil
}

func (st *Store) open() (err error) {
	o := &st.options
	st.Layers = layers.New(o.Layers, st.log)
	if st.index, err = index.Open(st.dir,
		index.Options{FS: o.FS, Log: st.log, Lower: st.Layers, OnEvent: o.Heard,
			MeasureDisk: st.WholeBytes, Rebuilding: o.Making, OnBroken: o.Broken}); err != nil {
		return fmt.Errorf("index: %w", err)
	}
	st.Layers.Memos = &st.index.Memos
	st.committer = &committer{index: st.index, queue: make(chan *commitRequest),
		stop: make(chan struct{})}
	go st.committer.run()
	if st.cas, err = cas.Open(st.dir,
		cas.Options{FS: o.FS, Stamps: st.index.Stamps()}); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	if err := st.openForms(); err != nil {
		return fmt.Errorf("packed blobs: %w", err)
	}
	if err := st.emptyStaging(); err != nil {
		return fmt.Errorf("staging: %w", err)
	}
	if st.views, err = views.Open(views.Options{Dir: st.path("views"), PathAccess: o.PathAccess,
		Blobs: st.cas, Packing: st.packing, Index: st.index, Now: st.now,
		Log: st.log}); err != nil {
		return fmt.Errorf("views: %w", err)
	}
	st.collector.keepReserve()
	return nil
}

// OpenReadOnly opens a store without taking a lock or writing to it, and returns its builds. It
// fails with a *LockedError if a daemon has the store open.
func OpenReadOnly(ctx context.Context, dir string) (*Store, []index.Build, error) {
	if err := checkLock(dir); err != nil {
		return nil, nil, err
	}
	st := &Store{dir: dir, uid: uint32(os.Getuid()), log: slog.New(slog.DiscardHandler),
		now: time.Now, Layers: layers.New(nil, nil)}
	st.settings.Store(&Settings{})
	var builds []index.Build
	var err error
	if st.index, builds, err = index.OpenReadOnly(ctx, dir); err != nil {
		return nil, nil, err
	}
	if st.cas, err = cas.Open(dir, cas.Options{ReadOnly: true}); err != nil {
		return nil, nil, err
	}
	st.packing, err = packing.Open(packing.Options{Dir: dir, Whole: st.cas, Memory: st.index,
		Log: st.log, Sketches: st.index.Sketches, Shares: st.index.Shares, ReadOnly: true})
	return st, builds, err
}

// Start starts the collector and the packer, which run until the context ends.
func (st *Store) Start(ctx context.Context) {
	st.work.Go(func() { st.packer.run(ctx) })
	st.packer.RequestSweep()
	st.work.Go(func() { st.collector.collectLoop(ctx) })
}

// Close releases the state directory. The context of Start must have ended before.
func (st *Store) Close() (err error) {
	st.work.Wait()
	if st.views != nil {
		st.views.Close()
	}
	if st.index != nil {
		close(st.committer.stop)
		err = st.index.Close()
	}
	return errors.Join(err, st.lock.Close())
}

// SetSettings replaces the settings.
func (st *Store) SetSettings(s Settings) {
	st.settings.Store(&s)
	st.packer.RequestSweep()
	st.ledger.WakeCollector()
}

// Index returns the store's index.
func (st *Store) Index() *index.Index { return st.index }

// Blobs returns the store of whole blobs.
func (st *Store) Blobs() *cas.Store { return st.cas }

// Packing returns the store of blobs in all their representations.
func (st *Store) Packing() *packing.Store { return st.packing }

// Views returns the store's views.
func (st *Store) Views() *views.Store { return st.views }

// Ledger returns the account of reserved space.
func (st *Store) Ledger() *Ledger { return st.ledger }

// Collector returns the store's collector.
func (st *Store) Collector() *Collector { return st.collector }

// Packer returns the store's packer.
func (st *Store) Packer() *Packer { return st.packer }

// Directory returns the absolute path of the state directory.
func (st *Store) Directory() string { return st.dir }

func (st *Store) path(name ...string) string {
	return filepath.Join(append([]string{st.dir}, name...)...)
}

// Stage makes a directory for work in progress. The caller calls remove, also after an error.
func (st *Store) Stage(prefix string) (dir string, remove func(), err error) {
	remove = func() {}
	if err := os.MkdirAll(st.path("staging"), 0o700); err != nil { // a user may have deleted it
		return "", remove, err
	}
	if dir, err = os.MkdirTemp(st.path("staging"), prefix); err != nil {
		return "", remove, err
	}
	return dir, func() {
		if err := os.RemoveAll(dir); err != nil {
			st.log.Warn("cannot remove a staging directory", "path", dir, "error", err)
		}
	}, nil
}

func (st *Store) emptyStaging() error {
	entries, err := os.ReadDir(st.path("staging"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		// it may belong to the user of a worker that was killed
		if err := os.RemoveAll(st.path("staging", e.Name())); err != nil {
			st.log.Warn("cannot remove a staging "+
				"directory", "path", st.path("staging", e.Name()), "error", err)
		}
	}
	return nil
}
