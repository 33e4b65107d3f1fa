package index

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/reserve"
	"github.com/epcached/epcached/internal/memo"
)

// Options of Open.
type Options struct {
	FS  cas.FS       // nil: the operating system's
	Log *slog.Logger // nil: nothing is logged

	// OnEvent receives each event, one at a time and in order, also those that the index adds
	// itself. It must not block, nor call the index.
	OnEvent func(Event)

	// MeasureDisk returns a blob's bytes on disk, in whole blocks. nil: its size in blocks of 4
	// KiB.
	MeasureDisk func(cas.Digest) (int64, error)

	// Rebuilding is called every few seconds while Open makes the database from the manifests, with
	// the builds so far and the percentage of the whole work. It may be nil.
	Rebuilding func(builds uint64, percent int)

	Lower Lower // nil if there are no layers

	// OnBroken is called once if the database turns out to be damaged after Open: from then on all
	// calls that need it fail with a *BrokenError, and Close does not wait for blocked calls. The
	// process should end, so that its next start opens the index with a new database. OnBroken must
	// not block, and may be nil.
	OnBroken func(*BrokenError)

	now func() time.Time // nil: time.Now
}

// Index is the open index of a store. See the package comment for what it promises.
//
// Lock order: changing first, then one of the locks of database, memory or journal, which are never
// nested.
type Index struct {
	Options // none of FS, Log and now is nil

	dir    string // the state directory
	opened bool   // set by Open

	// Journal has the states, pins, tombstones and events of builds.
	Journal *Journal

	// The following are in memory, written within seconds, and may be lost with index.db.
	Memos    Memos
	Uses     Uses
	Counters Counters
	Views    Table // paths of views, by build ids
	Failures Table // failed compiles, by keys of the caller
	Sketches Table // sketches for finding similar blobs, by digests
	// Shares has the result of comparing a blob, by digests. A blob without one has not been read.
	Shares Table

	Reserve *reserve.Reserve // space for writes that must not fail on a full disk

	db        *database
	rows      *writeBehind
	entries   *memo.CostCache[lookupKey, []Build]
	manifests *manifests

	knownMu   sync.Mutex // guards the next two fields
	retracted map[BuildID]bool
	problems  []Finding

	rebuilt string // set by Open

	sizes map[cas.Digest]int64 // of blobs, if the index is read-only; otherwise nil

	woken   chan struct{} // has a token when a flush is needed
	stop    context.CancelFunc
	stopped sync.WaitGroup
	closing sync.Once
}

const (
	manifestsName = "manifests"
	incomingName  = "incoming"
	entriesBytes  = 8 << 20
	flushEvery    = 3 * time.Second
)

// Open opens the index in the state directory dir or makes one. It completes or removes changes
// that a crash interrupted. A database that is missing, damaged or of another schema is moved into
// the quarantine and made again from the manifests, see Rebuilt. It fails with a *NewerError if the
// journal was written by a newer epcached.
func Open(dir string, o Options) (*Index, error) {
	x, err := openOnce(dir, o)
	if errors.As(err, new(*BrokenError)) {
		again, failed := openOnce(dir, o) // again, because the database is marked as damaged now
		if failed == nil {
			return again, nil
		}
		err = errors.Join(err, failed)
	}
	return x, err
}

func newIndex(dir string, o Options) *Index {
	x := &Index{
		Options: o, dir: dir, entries: memo.NewCostCache[lookupKey, []Build](entriesBytes),
		retracted: make(map[BuildID]bool), woken: make(chan struct{}, 1),
	}
	x.FS = cmp.Or[cas.FS](x.FS, cas.OS{})
	x.Log = cmp.Or(x.Log, slog.New(slog.DiscardHandler))
	if x.now == nil {
		x.now = time.Now
	}
	x.Reserve = reserve.New(x.FS, dir)
	x.db = &database{fs: x.FS, dir: dir, path: filepath.Join(dir, "index.db"), reserve: x.Reserve,
		onBroken: x.reportBroken}
	x.rows = newWriteBehind(x.db, x.wake)
	files := filepath.Join(dir, manifestsName)
	x.manifests = &manifests{fs: x.FS, dir: files, incoming: filepath.Join(files, incomingName),
		now: x.now, wake: x.wake, times: Table{rows: x.rows, bucket: bucketDirs}}
	x.manifests.shards.FS, x.manifests.shards.Dir = x.FS, files
	x.Memos = Memos{table: Table{x.rows, bucketMemo, maxMemos}, now: x.now}
	x.Uses = Uses{table: Table{rows: x.rows, bucket: bucketUse}, latest: make(map[BuildID]Usage)}
	x.Counters = Counters{table: Table{x.rows, bucketCounters, 1024},
		counts:  make(map[string]uint64),
		unsaved: make(map[string]bool)}
	x.rows.beforeFlush = []func(){x.Uses.save, x.Counters.save}
	x.Views = Table{rows: x.rows, bucket: bucketViews}
	x.Failures = Table{x.rows, bucketFailures, 1 << 14}
	x.Sketches, x.Shares = Table{rows: x.rows, bucket: bucketSketches},
		Table{rows: x.rows, bucket: bucketShares}
	return x
}

func openOnce(dir string, o Options) (*Index, error) {
	x := newIndex(dir, o)
	if err := x.open(); err != nil {
		if x.Journal != nil {
			err = errors.Join(err, x.Journal.close())
		}
		return nil, fmt.Errorf("open index %s: %w", dir, errors.Join(err, x.db.close()))
	}
	x.opened = true
	ctx, stop := context.WithCancel(context.Background())
	x.stop = stop
	x.stopped.Go(func() { x.flushUntil(ctx) })
	return x, nil
}

func (x *Index) open() error {
	_, err := os.Lstat(x.manifests.dir)
	first := errors.Is(err, fs.ErrNotExist) // a new store has no database to lose
	if err := x.makeDirs(); err != nil {
		return err
	}
	var damage error
	if err := x.Reserve.DropHollow(); err != nil {
		return err
	}
	x.Journal, damage, err = openJournal(x.FS, x.dir, x.Reserve)
	if err != nil {
		return err
	}
	x.Journal.subscriber, x.Journal.now, x.Journal.wake = x.OnEvent, x.now, x.wake
	x.Journal.exists = x.exists
	if damage != nil {
		x.report(Finding{"damaged", "journal", damage.Error()})
	}
	why, err := x.db.open()
	if err != nil {
		return err
	}
	if why != "" && !first {
		x.rebuilt = why
		x.Log.Warn("index.db is rebuilt from the manifests", "store", x.dir, "reason", why)
	}
	all, err := x.differences()
	if err == nil {
		err = x.applyDifferences(all)
	}
	if err != nil {
		return err
	}
	x.Journal.prune(func(id BuildID) bool {
		_, err := os.Lstat(x.manifests.path(id))
		return !errors.Is(err, fs.ErrNotExist)
	}, x.Lower)
	return x.Counters.load()
}

// makeDirs makes the directories of manifests, and removes staged manifests that a crash left.
func (x *Index) makeDirs() error {
	if err := cas.MakeDir(x.FS, x.dir); err != nil {
		return err
	}
	if err := x.manifests.shards.Open(); err != nil {
		return err
	}
	if err := cas.RemoveLeftovers(x.FS, x.manifests.incoming); err != nil {
		return err
	}
	for _, name := range []string{"journal.new", "journal.damaged", "index.db.new"} {
		if err := remove(x.FS, filepath.Join(x.dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// Close writes what is in memory and closes the files. Calls that are still running may fail.
func (x *Index) Close() (err error) {
	x.closing.Do(func() {
		x.stop()
		if broken := x.db.brokenError(); broken != nil {
			// callers that wait for the database may block forever
			err = errors.Join(broken, x.Journal.close())
			return
		}
		x.stopped.Wait()
		if err = x.flush(); cas.IsDiskFull(err) {
			x.Log.Warn("cannot write usage counters", "store", x.dir, "error", err)
			err = nil
		}
		err = errors.Join(err, x.Journal.close(), x.db.close())
	})
	return err
}

// wake asks for a flush some seconds from now.
func (x *Index) wake() {
	select {
	case x.woken <- struct{}{}:
	default: // requested already
	}
}

// flushUntil flushes some seconds after there is something to flush; while
// nothing happens it sleeps.
func (x *Index) flushUntil(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-x.woken:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(flushEvery):
		case <-x.rows.full:
		}
		if err := x.flush(); err != nil {
			x.Log.Warn("cannot write usage counters, which stay in "+
				"memory", "store", x.dir, "error", err)
			x.wake()
		}
		if x.Memos.saved.Load() > maxMemos/8 {
			x.Memos.saved.Store(0)
			if err := x.Memos.trim(maxMemos); err != nil {
				x.Log.Warn("cannot drop old memos", "store", x.dir, "error", err)
			}
		}
	}
}

func (x *Index) flush() error {
	err := x.Journal.sync(math.MaxUint64)
	x.manifests.recordTimes()
	return errors.Join(err, x.rows.flush())
}

// Stamps remembers the stamps of blobs that package cas has verified.
func (x *Index) Stamps() cas.StampBook { return stamps{Table{rows: x.rows, bucket: bucketStamps}} }

// UnpackedStamps remembers those of unpacked copies, which are other files.
func (x *Index) UnpackedStamps() cas.StampBook {
	return stamps{Table{rows: x.rows, bucket: bucketUnpacked}}
}

// RecipeStamps remembers those of verified recipes, by the digests of their blobs.
func (x *Index) RecipeStamps() cas.StampBook {
	return stamps{Table{rows: x.rows, bucket: bucketRecipeStamps}}
}

// Rebuilt returns why Open made the database again, or "".
func (x *Index) Rebuilt() string { return x.rebuilt }

// Problems returns the problems of manifests and journal that were found at Open and since. Damaged
// files were moved to quarantine, and newer ones were left in place.
func (x *Index) Problems() []Finding {
	x.knownMu.Lock()
	defer x.knownMu.Unlock()
	return append([]Finding(nil), x.problems...)
}

// reportBroken is called once, when the database turned out to be damaged. unmarked is the error if
// the mark could not be written, so that the next Open may use the database again.
func (x *Index) reportBroken(err *BrokenError, unmarked error) {
	x.Log.Error("index.db is damaged; the next start rebuilds it from the manifests",
		"store", x.dir, "cause", err.Cause, "panic", panicIn(err))
	if unmarked != nil {
		x.Log.Error("index.db cannot be marked as damaged: remove it before the next start",
			"store", x.dir, "error", unmarked)
	}
	if x.opened && x.OnBroken != nil {
		x.OnBroken(err)
	}
}

// maxProblems bounds the memory of the problems, because a directory may be full of foreign files.
const maxProblems = 1000

func (x *Index) report(f Finding) {
	x.knownMu.Lock()
	if len(x.problems) < maxProblems {
		x.problems = append(x.problems, f)
	}
	x.knownMu.Unlock()
	x.Log.Error("store has a problem", "store", x.dir, "kind", f.Kind, "object", f.Object,
		"detail", f.Detail)
}

func (x *Index) exists(id BuildID) error {
	_, err := x.Get(id)
	return err
}

func (x *Index) isRetracting(id BuildID) bool {
	x.knownMu.Lock()
	defer x.knownMu.Unlock()
	return x.retracted[id]
}

// retracting returns the builds that are being retracted. Their rows may still exist.
func (x *Index) retracting() map[BuildID]bool {
	x.knownMu.Lock()
	defer x.knownMu.Unlock()
	return maps.Clone(x.retracted)
}
