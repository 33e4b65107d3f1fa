package index

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
)

// Options of Open.
type Options struct {
	FS  cas.FS       // nil: the operating system's
	Log *slog.Logger // nil: nothing is logged

	// Heard is told of each event, one at a time and in order, also of those
	// that the index notes itself. It must not wait, nor call the index.
	Heard func(Event)

	// Disk tells what a blob takes on the disk, in whole blocks. nil: its size
	// in blocks of 4 KiB.
	Disk func(cas.Digest) (int64, error)

	// Making is called every few seconds while Open makes the database from the manifests, with the
	// builds so far and the percentage of the whole work. It may be nil.
	Making func(builds uint64, percent int)

	// Broken is called once if the database turns out to be damaged after Open: from then on all
	// calls that need it fail with a *BrokenError, and Close does not wait for those that block in
	// it. The process should end, so that its next start opens the index with a new database. Broken
	// must not wait. It may be nil.
	Broken func(*BrokenError)

	now func() time.Time // nil: time.Now
}

// Index is the open index of a store. See the package comment for what it
// promises.
//
// Locks are taken in the order changing, then everything inside the database,
// soft or journal; none of those takes another.
type Index struct {
	Options // none of FS, Log and now is nil

	dir       string // the state folder
	manifests string
	incoming  string // manifests that have no name yet
	opened    bool   // set by Open

	db       *database
	reserve  *reserve
	soft     *soft
	journal  *journal
	entries  *bounded[lookupKey, []Build]
	changing sync.Mutex // held from a change of manifests until the database has it; guards folders
	folders  [256]folder
	memos    atomic.Int64 // saved since the memo was last trimmed

	useMu   sync.Mutex // makes Use one step
	countMu sync.Mutex // guards counts
	counts  map[string]uint64

	knownMu  sync.Mutex // guards the next two
	gone     map[BuildID]bool
	problems []Finding

	rebuilt string // set by Open

	sizes map[cas.Digest]int64 // of blobs, where the index is only read; else nil

	woken   chan struct{} // something is to be flushed
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

// Open opens the index in the state directory dir or makes one. It finishes or removes what a crash
// has left. A database that is missing, damaged or of another schema is moved into the quarantine
// and made again from the manifests, see Rebuilt. It fails with a *NewerError if the journal was
// written by a newer epcached.
func Open(dir string, o Options) (*Index, error) {
	x, err := openOnce(dir, o)
	if errors.As(err, new(*BrokenError)) {
		again, failed := openOnce(dir, o) // what the first one read is marked as damaged now
		if failed == nil {
			return again, nil
		}
		err = errors.Join(err, failed)
	}
	return x, err
}

func newIndex(dir string, o Options) *Index {
	x := &Index{
		Options: o, dir: dir,
		manifests: filepath.Join(dir, manifestsName), incoming: filepath.Join(dir, manifestsName, incomingName),
		entries: newBounded[lookupKey, []Build](entriesBytes), gone: make(map[BuildID]bool),
		counts: make(map[string]uint64), woken: make(chan struct{}, 1),
	}
	if x.FS == nil {
		x.FS = cas.OS{}
	}
	if x.Log == nil {
		x.Log = slog.New(slog.DiscardHandler)
	}
	if x.now == nil {
		x.now = time.Now
	}
	x.reserve = newReserve(x.FS, dir)
	x.db = &database{x: x, path: filepath.Join(dir, "index.db")}
	x.soft = newSoft(x.db, x.wake)
	return x
}

func openOnce(dir string, o Options) (*Index, error) {
	x := newIndex(dir, o)
	if err := x.open(); err != nil {
		if x.journal != nil {
			err = errors.Join(err, x.journal.close())
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
	_, err := os.Lstat(x.manifests)
	first := errors.Is(err, fs.ErrNotExist) // a new store: that it has no database is no loss
	if err := x.makeFolders(); err != nil {
		return err
	}
	var damage error
	if err := x.reserve.dropHollow(); err != nil {
		return err
	}
	x.journal, damage, err = openJournal(x.FS, x.dir, x.reserve)
	if err != nil {
		return err
	}
	x.journal.heard = x.Heard
	if damage != nil {
		x.report(Finding{"damaged", "journal", damage.Error()})
	}
	why, err := x.db.open()
	if err != nil {
		return err
	}
	if why != "" && !first {
		x.rebuilt = why
		x.Log.Warn("index.db is made again from the manifests", "store", x.dir, "reason", why)
	}
	all, err := x.differences()
	if err == nil {
		err = x.learn(all)
	}
	if err != nil {
		return err
	}
	x.journal.prune(func(id BuildID) bool {
		_, err := os.Lstat(x.manifestPath(id))
		return !errors.Is(err, fs.ErrNotExist)
	})
	return x.loadCounters()
}

// makeFolders makes every folder that a manifest can ever need, and removes
// manifests that a crash kept from getting their names.
func (x *Index) makeFolders() error {
	if err := cas.MakeFolder(x.FS, x.dir); err != nil {
		return err
	}
	if err := cas.MakeShards(x.FS, x.manifests); err != nil {
		return err
	}
	if err := cas.RemoveLeftovers(x.FS, x.incoming); err != nil {
		return err
	}
	for _, name := range []string{"journal.new", "journal.damaged", "index.db.new"} {
		if err := remove(x.FS, filepath.Join(x.dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func (x *Index) loadCounters() error {
	rows, err := x.all(bucketCounters, 1024)
	for name, v := range rows {
		f := fields{b: v}
		x.counts[name] = f.u64()
	}
	return err
}

// Close writes what is in memory and closes the files. Calls that are still
// running may fail.
func (x *Index) Close() (err error) {
	x.closing.Do(func() {
		x.stop()
		if broken := x.db.isBroken(); broken != nil {
			err = errors.Join(broken, x.journal.close()) // what waits for the database may do so forever
			return
		}
		x.stopped.Wait()
		err = errors.Join(x.flush(), x.journal.close(), x.db.close())
	})
	return err
}

// wake asks for a flush some seconds from now.
func (x *Index) wake() {
	select {
	case x.woken <- struct{}{}:
	default: // asked for already
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
		case <-x.soft.full:
		}
		if err := x.flush(); err != nil {
			x.Log.Warn("what may be lost could not be written, and stays in memory", "store", x.dir, "error", err)
			x.wake()
		}
		if x.memos.Load() > maxMemos/8 {
			x.memos.Store(0)
			if err := x.trimMemo(maxMemos); err != nil {
				x.Log.Warn("old memos could not be dropped", "store", x.dir, "error", err)
			}
		}
	}
}

func (x *Index) flush() error {
	err := x.journal.flush()
	x.settleFolders()
	return errors.Join(err, x.soft.flush())
}

// Rebuilt returns why Open made the database again, or "".
func (x *Index) Rebuilt() string { return x.rebuilt }

// Problems returns what was found wrong with manifests and journal at Open and
// since: damaged ones are in the quarantine, newer ones where they were.
func (x *Index) Problems() []Finding {
	x.knownMu.Lock()
	defer x.knownMu.Unlock()
	return append([]Finding(nil), x.problems...)
}

// isBroken is called once, when the database turned out to be damaged. unmarked is why the next Open
// may use it again; nil: it will not.
func (x *Index) isBroken(err *BrokenError, unmarked error) {
	x.Log.Error("index.db is damaged; the next start makes it again from the manifests",
		"store", x.dir, "cause", err.Cause)
	if unmarked != nil {
		x.Log.Error("index.db cannot be marked as damaged: remove it before the next start",
			"store", x.dir, "error", unmarked)
	}
	if x.opened && x.Broken != nil {
		x.Broken(err)
	}
}

// maxProblems bounds the memory that a folder full of rubbish can take.
const maxProblems = 1000

func (x *Index) report(f Finding) {
	x.knownMu.Lock()
	if len(x.problems) < maxProblems {
		x.problems = append(x.problems, f)
	}
	x.knownMu.Unlock()
	x.Log.Error("store has a problem", "store", x.dir, "kind", f.Kind, "object", f.Object, "detail", f.Detail)
}

func (x *Index) isGone(id BuildID) bool {
	x.knownMu.Lock()
	defer x.knownMu.Unlock()
	return x.gone[id]
}

// goneNow gives what is being retracted: its rows may be there still.
func (x *Index) goneNow() map[BuildID]bool {
	x.knownMu.Lock()
	defer x.knownMu.Unlock()
	return maps.Clone(x.gone)
}

// SetState says whether a build may be served, durably when it returns.
func (x *Index) SetState(id BuildID, s State) error {
	switch s.Name {
	case Current, Withheld, Damaged:
	default:
		return fmt.Errorf("build %s: no state is called %q", id, s.Name)
	}
	if _, err := x.Get(id); err != nil {
		return fmt.Errorf("build %s: %w", id, err)
	}
	if s.At.IsZero() {
		s.At = x.now()
	}
	s.At = trimTime(s.At)
	if err := x.journal.state(id, s); err != nil {
		return fmt.Errorf("note that build %s is %s: %w", id, s.Name, err)
	}
	return nil
}

// StateOf returns what is known against a build, from memory.
func (x *Index) StateOf(id BuildID) State {
	if s, ok := x.journal.stateOf(id); ok {
		return s
	}
	return State{Name: Current}
}

// Note adds to the history of a request, or of the machine; written within
// seconds. Texts are cut off at 4 KiB, names at 512 bytes. After an error the
// event is known until Close.
func (x *Index) Note(ctx context.Context, e Event) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if e.At.IsZero() {
		e.At = x.now()
	}
	x.wake()
	return x.journal.note(e)
}

// History returns what is still known of a request, oldest first.
func (x *Index) History(k RequestKey) ([]Event, error) {
	return x.journal.eventsThat(func(e *Event) bool { return e.RequestKey == k }), nil
}

// Events returns what is still known of that time and later, of all requests
// and of the machine, oldest first: some 8,000 at least, and never more than
// twice as many.
func (x *Index) Events(since time.Time) []Event {
	return x.journal.eventsThat(func(e *Event) bool { return !e.At.Before(since) }) // a clock may have been set back
}
