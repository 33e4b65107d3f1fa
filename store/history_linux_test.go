package store_test

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cas/crashfs"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/audit"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

var (
	exploreStates = flag.Int("explore.states", 5_000, "crash states to look at")
	exploreSeed   = flag.Uint64("explore.seed", 0,
		"explore the history of this seed alone; 0: those from 1 on")
	exploreOps = flag.Int("explore.ops", 12, "operations of a history")
)

// TestNoCrashLosesAcknowledgedOperations runs random histories of a store. Before every step that
// changes something on the disk it takes what a power cut could leave at that moment, opens that,
// and compares it with what was acknowledged by then.
func TestNoCrashLosesAcknowledgedOperations(t *testing.T) {
	if *exploreSeed != 0 {
		h := explore(*exploreSeed, *exploreOps, nil, 0, 0)
		t.Log(h)
		require.NoError(t, h.failed)
		return
	}
	found, states := exploreMany(*exploreStates, nil)
	t.Logf("%d states", states)
	if found != nil {
		t.Fatal(found)
	}
	require.GreaterOrEqual(t, states, *exploreStates)
}

// TestTheExplorerFindsPlantedBugs is the test of the test: each of these bugs has been planted in
// the file system's seam, where it has the effect of the bug in the store.
func TestTheExplorerFindsPlantedBugs(t *testing.T) {
	for name, plant := range map[string]func(cas.FS) cas.FS{
		"publish before sync": func(f cas.FS) cas.FS {
			return without{FS: f, sync: "/staging/"}
		},
		"manifest before its sync": func(f cas.FS) cas.FS {
			return without{FS: f, sync: "/manifests/"}
		},
		"lost directory sync": func(f cas.FS) cas.FS {
			return without{FS: f, syncDir: "/objects"}
		},
		"manifest's lost directory": func(f cas.FS) cas.FS {
			return without{FS: f, syncDir: "/manifests"}
		},
		"unlink before index":      func(f cas.FS) cas.FS { return &lateRemovals{FS: f} },
		"tombstone after manifest": func(f cas.FS) cas.FS { return &lateTombstones{FS: f} },
		"recipe that is not synced": func(f cas.FS) cas.FS {
			return without{FS: f, sync: "/recipes"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			found, states := exploreMany(*exploreStates, plant)
			require.NotNil(t, found, "not found in %d states", states)
			t.Logf("found after %d states: %v", states, found)
		})
	}
}

// TestTheExplorerFindsAReusedViewPath gives views few ids, so that paths come again. The history
// itself shows it, so that no state is looked at.
func TestTheExplorerFindsAReusedViewPath(t *testing.T) {
	real := crand.Reader
	t.Cleanup(func() { crand.Reader = real })
	crand.Reader = fewIDs{real}
	const none = -1
	for seed := range uint64(1000) {
		if h := explore(seed+1, *exploreOps, nil, 0, none); h.failed != nil {
			// A path that comes again can also be in the way of a new view.
			require.Regexp(t, "was another build's|file exists", h.failed.Error())
			t.Log(h)
			return
		}
	}
	t.Fatal("not found in 1,000 histories")
}

const viewID = 12 // bytes of a view's id

// fewIDs gives random bytes of which those for ids of views are few.
type fewIDs struct{ io.Reader }

func (f fewIDs) Read(b []byte) (int, error) {
	n, err := f.Reader.Read(b)
	if len(b) == viewID {
		clear(b[:len(b)-1])
		b[len(b)-1] %= 2
	}
	return n, err
}

// without is a file system that does not sync what has these words in its path.
type without struct {
	cas.FS
	sync, syncDir string
}

func (w without) Sync(f *os.File) error {
	if w.sync != "" && strings.Contains(f.Name(), w.sync) {
		return nil
	}
	return w.FS.Sync(f)
}

func (w without) SyncDir(path string) error {
	if w.syncDir != "" && strings.Contains(path, w.syncDir) {
		return nil
	}
	return w.FS.SyncDir(path)
}

// lateTombstones is a file system that does not sync tombstones, so that nothing is durable of them
// before the manifests go.
type lateTombstones struct {
	cas.FS
	written atomic.Bool // a tombstone is the last that was written to the journal
}

func (l *lateTombstones) WriteAt(f *os.File, p []byte, off int64) (int, error) {
	if strings.Contains(f.Name(), "/journal") {
		l.written.Store(bytes.Contains(p, []byte("to free space")))
	}
	return l.FS.WriteAt(f, p, off)
}

func (l *lateTombstones) Sync(f *os.File) error {
	if strings.Contains(f.Name(), "/journal") && l.written.Load() {
		return nil
	}
	return l.FS.Sync(f)
}

// lateRemovals is a file system that does not sync the removal of manifests, so that blobs go
// before the builds that need them.
type lateRemovals struct {
	cas.FS
	removed atomic.Bool // a manifest, by the last change of their directories
}

func (l *lateRemovals) Remove(path string) error {
	if strings.Contains(path, "/manifests/") && !strings.Contains(path, "/incoming/") {
		l.removed.Store(true)
	}
	return l.FS.Remove(path)
}

func (l *lateRemovals) SyncDir(path string) error {
	if strings.Contains(path, "/manifests/") && l.removed.Swap(false) {
		return nil
	}
	return l.FS.SyncDir(path)
}

// exploreMany explores histories on all processors until so many states were looked at, or one is
// wrong. That one is returned with as few operations as show it.
func exploreMany(states int, plant func(cas.FS) cas.FS) (found *history, seen int) {
	var count atomic.Int64
	var seed atomic.Uint64
	var enough atomic.Bool
	var mu sync.Mutex
	var wrong *history
	var all sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		all.Go(func() {
			for count.Load() < int64(states) && !enough.Load() {
				h := explore(seed.Add(1), *exploreOps, plant, 0, 0)
				count.Add(int64(h.states))
				if h.failed != nil {
					mu.Lock()
					if wrong == nil || h.seed < wrong.seed {
						wrong = h
					}
					mu.Unlock()
					enough.Store(true)
				}
			}
		})
	}
	all.Wait()
	if wrong == nil {
		return nil, int(count.Load())
	}
	return wrong.least(), int(count.Load())
}

// fact is what was acknowledged of one build.
type fact struct {
	build  index.Build
	pinned bool
	state  string
	gone   bool
	evict  bool // gone by eviction: there is a tombstone
}

// history is a store, what is done to it, and what was acknowledged.
type history struct {
	seed   uint64
	random *rand.Rand
	plant  func(cas.FS) cas.FS
	skip   uint64 // a bit for each operation that is left out
	only   int    // the number of the one operation, from 1, whose states are looked at; 0: all
	op     int    // index of the operation under way

	root  string
	fs    *crashfs.FS
	store *store.Store
	now   time.Time
	facts map[index.BuildID]*fact
	// files of the builds that are being published, by the model's name
	coming map[string][]cas.Digest
	doing  map[index.BuildID]bool // builds that the operation under way changes
	ops    []string

	repairing bool                     // the operation under way may take files away
	paths     map[string]index.BuildID // of views
	published int                      // builds, also those that were not stored

	mu     sync.Mutex
	off    bool // no state is looked at
	every  int  // one of so many steps is looked at
	steps  int
	states int
	failed error
}

func (h *history) String() string {
	return fmt.Sprintf("seed %d, after %d states: %v\n  -args -explore.seed=%d\n  %s", h.seed,
		h.states, h.failed, h.seed,
		strings.Join(h.ops, "\n  "))
}

// explore runs the history of a seed, without the operations that skip has a bit for.
// Where only is not 0, states are looked at during that operation alone.
func explore(seed uint64, ops int, plant func(cas.FS) cas.FS, skip uint64, only int) *history {
	h := &history{seed: seed, only: only, random: rand.New(rand.NewPCG(seed, 1)), plant: plant,
		skip: skip, now: time.Unix(1_700_000_000, 0),
		facts: make(map[index.BuildID]*fact), coming: make(map[string][]cas.Digest),
		doing: make(map[index.BuildID]bool), paths: make(map[string]index.BuildID)}
	h.failed = h.run(ops)
	return h
}

// least leaves out operations as long as the history still shows the failure.
func (h *history) least() *history {
	best, last := h, h.op
	for i := range last {
		if next := explore(h.seed, last+1, h.plant, best.skip|1<<i, last+1); next.failed != nil {
			best = next
		}
	}
	return best
}

func memoryDir() (string, error) {
	if dir, err := os.MkdirTemp("/dev/shm", "history"); err == nil {
		return dir, nil
	}
	return os.MkdirTemp("", "history")
}

func (h *history) run(ops int) (err error) {
	if h.root, err = memoryDir(); err != nil {
		return err
	}
	defer os.RemoveAll(h.root)
	if h.fs, err = crashfs.New(h.root); err != nil {
		return err
	}
	defer h.fs.Close()
	h.every, h.off = 64, h.only != 0 // steps of the first start are alike
	if err := h.open(); err != nil {
		return err
	}
	defer func() {
		h.off = true
		if h.store != nil {
			err = errors.Join(err, h.store.Close())
		}
	}()
	h.every = 1
	for i := range ops {
		op := operations[h.random.IntN(len(operations))]
		own := h.random.Uint64() // an operation that is left out changes nothing of the others
		if h.skip&(1<<i) != 0 {
			continue
		}
		h.now, h.op = h.now.Add(time.Minute), i
		h.off = h.only != 0 && h.only != i+1
		h.ops = append(h.ops, op.name)
		if err := op.do(h, rand.New(rand.NewPCG(own, 2))); err != nil {
			return fmt.Errorf("%s: %w", op.name, err)
		}
		clear(h.doing)
		h.repairing = false
		clear(h.coming)
		if h.failed != nil {
			return h.failed
		}
	}
	return nil
}

func options(now func() time.Time, fs cas.FS) store.Options {
	return store.Options{FS: fs, Log: slog.New(slog.DiscardHandler), Now: now,
		Settings: store.Settings{Pack: store.Packing{When: store.PackCold, After: time.Hour}},
		Making:   func(uint64, int) {}, Broken: func(*index.BrokenError) {},
		Heard:       func(index.Event) {},
		OnPublished: func(*index.Build, uint32) {}, OnWithheld: func(*index.Build) {},
		Compiling: func() bool { return false }}
}

func (h *history) open() (err error) {
	var fs cas.FS = &steps{FS: h.fs, before: h.look}
	if h.plant != nil {
		fs = h.plant(fs)
	}
	h.store, err = store.Open(filepath.Join(h.root, "state"),
		options(func() time.Time { return h.now }, fs))
	return err
}

// steps calls before with each step that changes something.
type steps struct {
	*crashfs.FS
	before func()
}

func (s *steps) Mkdir(path string) error               { s.before(); return s.FS.Mkdir(path) }
func (s *steps) Create(path string) (*os.File, error)  { s.before(); return s.FS.Create(path) }
func (s *steps) Truncate(f *os.File, size int64) error { s.before(); return s.FS.Truncate(f, size) }
func (s *steps) Allocate(f *os.File, size int64) error { s.before(); return s.FS.Allocate(f, size) }
func (s *steps) Sync(f *os.File) error                 { s.before(); return s.FS.Sync(f) }
func (s *steps) Link(from, to string) error            { s.before(); return s.FS.Link(from, to) }
func (s *steps) Rename(from, to string) error          { s.before(); return s.FS.Rename(from, to) }
func (s *steps) Remove(path string) error              { s.before(); return s.FS.Remove(path) }
func (s *steps) SyncDir(path string) error             { s.before(); return s.FS.SyncDir(path) }

func (s *steps) WriteAt(f *os.File, p []byte, off int64) (int, error) {
	s.before()
	return s.FS.WriteAt(f, p, off)
}

func (s *steps) LinkAt(from string, dir *os.File, name string) error {
	s.before()
	return s.FS.LinkAt(from, dir, name)
}

func (s *steps) UnlinkAt(dir *os.File, name string) error {
	s.before()
	return s.FS.UnlinkAt(dir, name)
}

// look takes what a power cut could leave now, and compares it with what was acknowledged.
func (h *history) look() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.steps++
	if h.off || h.failed != nil || h.steps%h.every != 0 {
		return
	}
	h.states++
	if err := h.crash(rand.New(rand.NewPCG(h.seed, uint64(h.states)<<8))); err != nil {
		h.failed = fmt.Errorf("state %d: %w", h.states, err)
	}
}

func (h *history) crash(random *rand.Rand) error {
	root, err := memoryDir()
	if err != nil {
		return err
	}
	defer os.RemoveAll(root)
	loss := []crashfs.Loss{crashfs.Some, crashfs.Everything, crashfs.Some,
		crashfs.Nothing}[random.IntN(4)]
	if err := h.fs.Crash(root, loss, random.Uint64()); err != nil {
		return err
	}
	now := h.now.Add(time.Hour)
	st, err := store.Open(filepath.Join(root, "state"),
		options(func() time.Time { return now }, crashfs.Sparse{}))
	if err != nil {
		return fmt.Errorf("it does not open: %w", err)
	}
	err = h.compare(st)
	if err == nil && random.IntN(8) == 0 {
		err = h.recover(st)
	}
	return errors.Join(err, st.Close())
}

// compare returns what of a store is not as it was acknowledged.
func (h *history) compare(st *store.Store) error {
	there := make(map[index.BuildID]bool)
	if problems := st.Index().Problems(); len(problems) > 0 {
		return fmt.Errorf("problems of the index: %v", problems)
	}
	err := st.Index().Each(context.Background(), func(b index.Build) error {
		there[b.ID] = true
		f := h.facts[b.ID]
		switch {
		case f == nil && !slices.EqualFunc(h.coming[b.ModelName], b.Files,
			func(d cas.Digest, f index.File) bool { return d == f.Digest }):
			return fmt.Errorf("build %s of %s was never published", b.ID, b.ModelName)
		case f != nil && f.gone && !h.doing[b.ID]:
			return fmt.Errorf("build %s of %s was removed, and is back", b.ID, b.ModelName)
		case f != nil && f.build.ModelName != b.ModelName:
			return fmt.Errorf("build %s is of %s, not of %s", b.ID, b.ModelName, f.build.ModelName)
		}
		for _, m := range b.Members[min(1, len(b.Members)):] {
			found, err := st.Index().Lookup(m.AloneKey, b.Scope)
			if is := func(f index.Build) bool { return f.ID == b.ID }; err != nil ||
				!slices.ContainsFunc(found, is) {
				return fmt.Errorf("group %s of %s is not found under its member: %w", b.ID,
					b.ModelName, err)
			}
		}
		if h.mayLack(st, b.ID) {
			return nil
		}
		return requireFiles(st, &b)
	})
	if err != nil {
		return err
	}
	for id, f := range h.facts {
		_, pinned := st.Index().Journal.Pinned(id)
		state := st.Index().Journal.StateOf(id).Name
		tombs := st.Index().Journal.Tombstones(func(g *index.Tombstone) bool {
			return g.BuildID == id
		})
		switch {
		case !there[id] && !f.gone && !h.doing[id]:
			return fmt.Errorf("build %s of %s was acknowledged, and is gone", id, f.build.ModelName)
		case !there[id] && f.evict && len(tombs) == 0:
			return fmt.Errorf("build %s of %s was evicted without a tombstone", id,
				f.build.ModelName)
		case there[id] && !h.doing[id] && pinned != f.pinned:
			return fmt.Errorf("build %s of %s: pinned %t, acknowledged %t", id, f.build.ModelName,
				pinned, f.pinned)
		case there[id] && !h.doing[id] && state != f.state:
			return fmt.Errorf("build %s of %s: state %q, acknowledged %q", id, f.build.ModelName,
				state, f.state)
		}
	}
	return nil
}

// mayLack reports whether files of a build may be missing: it is withheld for that, or a repair
// that is under way has not come to that yet.
func (h *history) mayLack(st *store.Store, id index.BuildID) bool {
	return h.repairing || st.Index().Journal.StateOf(id).Name == index.Damaged
}

// requireFiles reads every file of a build, whatever form it is in.
func requireFiles(st *store.Store, b *index.Build) error {
	for _, f := range b.Files {
		if err := st.Packing().Check(context.Background(), f.Digest); err != nil {
			return fmt.Errorf("build %s of %s, file %s: %w", b.ID, b.ModelName, f.Name, err)
		}
	}
	return nil
}

// recover has the store tidy up after the crash, as a daemon does. Then nothing is wrong, and it
// serves and takes builds.
func (h *history) recover(st *store.Store) error {
	ctx := context.Background()
	if err := st.RemoveLeftovers(ctx); err != nil {
		return err
	}
	reply, err := audit.Check(ctx, st, &wire.Check{Deep: true}, func(*wire.Progress) {})
	if err != nil {
		return err
	}
	lost := make(map[string]bool) // builds of which something may be missing
	var some *index.Build
	err = st.Index().Each(ctx, func(b index.Build) error {
		if h.mayLack(st, b.ID) {
			lost[b.BuildKey.String()] = true
		} else {
			some = &b
		}
		return nil
	})
	for _, f := range reply.Findings {
		if f.Kind != "missing" ||
			slices.ContainsFunc(f.Builds, func(key string) bool { return !lost[key] }) {
			return fmt.Errorf("a check finds: %v", f)
		}
	}
	if err != nil || some == nil {
		return err
	}
	v, err := st.View(ctx, some, store.Phases{Phase: func(string) {}})
	if err != nil {
		return fmt.Errorf("build %s of %s is not served: %w", some.ID, some.ModelName, err)
	}
	lease, err := v.Lease()
	return errors.Join(err, lease.Close())
}

var operations = []struct {
	name string
	do   func(h *history, random *rand.Rand) error
}{
	{"publish", (*history).publish},
	{"publish alike", func(h *history, random *rand.Rand) error {
		return h.publishLike(random, false)
	}},
	{"publish alike", func(h *history, random *rand.Rand) error {
		return h.publishLike(random, false)
	}},
	{"publish anew", func(h *history, random *rand.Rand) error {
		return h.publishLike(random, true)
	}},
	{"pack", (*history).pack},
	{"pack", (*history).pack},
	{"unpack", (*history).unpack},
	{"compact", (*history).compact},
	{"view", (*history).view},
	{"evict", (*history).evict},
	{"remove", (*history).remove},
	{"pin or unpin", (*history).pin},
	{"withhold", (*history).withhold},
	{"repair", (*history).repair},
	{"reopen", (*history).reopen},
	{"upgrade", (*history).upgrade},
}

// contents are the bytes of a build's files. Similar files share most of them.
func contents(random *rand.Rand, like [][]byte) (files [][]byte) {
	for i := range 2 {
		b := make([]byte, 8<<10+i<<18)
		source := rand.NewChaCha8([32]byte{byte(random.Uint32()), byte(random.Uint32()),
			byte(random.Uint32()), byte(random.Uint32())})
		_, _ = source.Read(b)
		if like != nil {
			copy(b, like[i%len(like)][:len(like[i%len(like)])-4<<10])
		}
		files = append(files, b)
	}
	return files
}

func (h *history) publish(random *rand.Rand) error {
	return h.store1(random, contents(random, nil), nil)
}

// publishLike publishes a build that shares most of its bytes with another, or takes its place.
func (h *history) publishLike(random *rand.Rand, anew bool) error {
	old := h.any(random)
	if old == nil || old.state == index.Damaged {
		return h.publish(random)
	}
	var like [][]byte
	for _, f := range old.build.Files {
		open, err := h.store.Packing().Open(context.Background(), f.Digest)
		if err != nil {
			return err
		}
		b, err := io.ReadAll(open)
		if err := errors.Join(err, open.Close()); err != nil {
			return err
		}
		like = append(like, b)
	}
	if !anew {
		return h.store1(random, contents(random, like), nil)
	}
	return h.store1(random, contents(random, like), old)
}

// store1 publishes a build with these files, in the place of the build old if that is not nil.
func (h *history) store1(random *rand.Rand, files [][]byte, old *fact) error {
	ctx := context.Background()
	dir, remove, err := h.store.Stage("history-")
	if err != nil {
		return err
	}
	defer remove()
	h.published++
	name := fmt.Sprintf("model %d", h.published)
	b := &index.Build{ModelName: name, Scope: "shared", UID: uint32(os.Getuid()), Created: h.now,
		Graph: "file0"}
	for i := range b.RequestKey {
		b.RequestKey[i], b.BuildKey[i] = byte(random.Uint32()), byte(random.Uint32())
	}
	b.ModelDigest[0] = 1
	if b.RequestKey[0]%3 == 0 { // a group, that is found under its second member too
		b.Members = []index.Member{{ModelName: name, ModelDigest: b.ModelDigest, Graph: "file0"},
			{ModelName: "second", ModelDigest: cas.Digest{2}, Graph: "file1",
				AloneKey: b.RequestKey}}
		b.Members[1].AloneKey[0]++
	}
	if old != nil {
		b.RequestKey, b.BuildKey = old.build.RequestKey, old.build.BuildKey
		for id, f := range h.facts { // all earlier ones of the key
			if !f.gone && f.build.BuildKey == b.BuildKey {
				h.doing[id] = true
			}
		}
	}
	var sizes []int64
	for i, content := range files {
		file := fmt.Sprintf("file%d", i)
		if err := h.write(filepath.Join(dir, file), content); err != nil {
			return err
		}
		h.coming[name] = append(h.coming[name], cas.SumBytes(content))
		b.Files = append(b.Files, index.File{Name: file})
		sizes = append(sizes, int64(len(content)))
	}
	reservation, err := h.store.Reserve(ctx, b.UID, true, sizes...)
	if err != nil {
		return err
	}
	hold := h.store.Blobs().Hold()
	err = h.store.Publish(ctx, store.Publication{Build: b, Dir: dir, UID: b.UID,
		Reservation: reservation,
		Kind:        "compiled"}, hold)
	hold.Release()
	reservation.Release()
	if err != nil {
		return err
	}
	// no request waits for it, so that it may be packed and evicted at once
	h.store.ExpectTakers(b.ID, 0)
	for id := range h.doing {
		h.facts[id].gone = true
	}
	pinned := old != nil && old.pinned
	h.facts[b.ID] = &fact{build: *b, pinned: pinned, state: index.Current}
	return nil
}

// told adds its outcome to the last operation.
func (h *history) told(what string) { h.ops[len(h.ops)-1] += ": " + what }

// write makes a file that a power cut may take the bytes of, as those of a compiler are.
func (h *history) write(path string, content []byte) error {
	f, err := h.fs.Create(path)
	if err != nil {
		return err
	}
	_, err = h.fs.WriteAt(f, content, 0)
	return errors.Join(err, f.Close())
}

// any is one of the builds that there are, nil where there is none.
func (h *history) any(random *rand.Rand) *fact {
	there := h.there()
	if len(there) == 0 {
		return nil
	}
	return there[random.IntN(len(there))]
}

// there are the builds that were not removed, in the order in which they were published.
func (h *history) there() (out []*fact) {
	for _, f := range slices.SortedFunc(maps.Values(h.facts), func(a, b *fact) int {
		return strings.Compare(a.build.ModelName, b.build.ModelName)
	}) {
		if !f.gone {
			out = append(out, f)
		}
	}
	return out
}

// pack packs the first build, in random order, that something is gained with.
func (h *history) pack(random *rand.Rand) error {
	return h.until(random, store.PackedNow,
		h.store.Packer().PackOnRequest(context.Background(), false))
}

// until changes the forms of builds in random order until one comes to that.
func (h *history) until(random *rand.Rand, what string,
	change func(*index.Build) (string, int64, error)) error {
	there := h.there()
	for _, i := range random.Perm(len(there)) {
		f := there[i]
		if f.state == index.Damaged {
			continue
		}
		did, _, err := change(&f.build)
		if err != nil || did == what {
			h.told(did)
			return err
		}
	}
	return nil
}

func (h *history) unpack(random *rand.Rand) error {
	return h.until(random, store.UnpackedNow,
		h.store.Packer().UnpackOnRequest(context.Background(), false))
}

func (h *history) compact(random *rand.Rand) error {
	ctx := context.Background()
	hot := random.IntN(2)
	is := func(d cas.Digest) bool { return int(d[0])%2 == hot }
	all, err := h.store.Packing().CompactableFamilies(ctx, is, func(d cas.Digest) bool {
		return !is(d)
	})
	for _, f := range all {
		if err == nil {
			h.told("a family")
			if err = h.store.Packing().Compact(ctx, f, nil); errors.Is(err, packing.ErrInUse) {
				err = nil
			}
		}
	}
	return err
}

func (h *history) view(random *rand.Rand) error {
	f := h.any(random)
	if f == nil || f.state == index.Damaged {
		return nil
	}
	v, err := h.store.View(context.Background(), &f.build, store.Phases{Phase: func(string) {}})
	if err != nil {
		return err
	}
	if other, ok := h.paths[v.Path()]; ok && other != f.build.ID {
		return fmt.Errorf("the view %s was another build's", v.Path())
	}
	h.paths[v.Path()] = f.build.ID
	lease, err := v.Lease()
	return errors.Join(err, lease.Close())
}

func (h *history) evict(random *rand.Rand) error {
	ctx := context.Background()
	account, err := h.store.Account()
	if err != nil {
		return err
	}
	for id, f := range h.facts {
		if !f.gone && !f.pinned {
			h.doing[id] = true
		}
	}
	bytes := account.Counted() * int64(random.IntN(100)) / 100
	plan, err := h.store.Collector().Plan(ctx, store.Owner{All: true}, store.Goal{Bytes: &bytes})
	if err != nil {
		return err
	}
	if err := h.store.Collector().Collect(ctx, plan, func(int64, int64) {}); err != nil {
		return err
	}
	for id := range h.doing {
		if _, err := h.store.Index().Get(id); errors.Is(err, index.ErrNotFound) {
			h.facts[id].gone, h.facts[id].evict = true, true
		} else if err != nil {
			return err
		}
	}
	return nil
}

func (h *history) remove(random *rand.Rand) error {
	f := h.any(random)
	if f == nil {
		return nil
	}
	h.doing[f.build.ID] = true
	one := []store.Removal{{Build: &f.build, Why: "by hand"}}
	if err := errors.Join(h.store.RemoveAll(one), one[0].Err); err != nil {
		return err
	}
	f.gone = true
	return nil
}

func (h *history) pin(random *rand.Rand) error {
	f := h.any(random)
	if f == nil {
		return nil
	}
	h.doing[f.build.ID] = true
	pin := &index.Pin{UID: f.build.UID, At: h.now}
	if f.pinned {
		pin = nil
	}
	err := h.store.Pin(context.Background(), f.build.ID, pin)
	f.pinned = err == nil != f.pinned
	return err
}

func (h *history) withhold(random *rand.Rand) error {
	f := h.any(random)
	if f == nil || f.state == index.Damaged { // which a state of its own would hide
		return nil
	}
	h.doing[f.build.ID] = true
	if err := h.store.Withhold(f.build.ID, index.Withheld, "a test"); err != nil {
		return err
	}
	f.state = index.Withheld
	return nil
}

// repair puts a blob into the quarantine, as if it were damaged: all builds that need it are
// withheld.
func (h *history) repair(random *rand.Rand) error {
	f := h.any(random)
	if f == nil {
		return nil
	}
	for id := range h.facts {
		h.doing[id] = true
	}
	h.repairing = true
	h.store.Repair(context.Background(),
		f.build.Files[random.IntN(len(f.build.Files))].Digest, "a test")
	for id, f := range h.facts {
		if state := h.store.Index().Journal.StateOf(id).Name; !f.gone && state != f.state {
			if state != index.Damaged {
				return fmt.Errorf("build %s of %s: state %q", id, f.build.ModelName, state)
			}
			f.state = state
		}
	}
	return nil
}

// upgrade opens the store as a version with another schema of index.db does: it makes that again.
func (h *history) upgrade(random *rand.Rand) error {
	if err := h.store.RebuildIndex("it has another schema"); err != nil {
		return err
	}
	return h.reopen(random)
}

func (h *history) reopen(*rand.Rand) error {
	err := h.store.Close()
	h.store = nil
	if err != nil {
		return err
	}
	return h.open()
}
