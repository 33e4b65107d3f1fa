package cache

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/index"
)

// bench is a cache over the stand-in compiler, with one runtime, in temporary folders.
type bench struct {
	testing.TB
	cache    *Cache
	compiler *standin.Compiler
	wrap     compilers.Compiler // nil: compiler itself
	state    string
	runtime  string
	policies map[string]Policy
	drivers  []DriverSource
	later    atomic.Int64 // nanoseconds, added to the cache's clock
	change   func(*Options)
}

// memoryDir makes a folder in memory, if that can be: hundreds of stores are made here, each of 512 folders that are
// synced, and what a power cut takes away is tested elsewhere.
func memoryDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "cache")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// newBench has no background work, for tests that count.
func newBench(t testing.TB) *bench { return newBenchWith(t, nil) }

func newBenchWith(t testing.TB, change func(*Options)) *bench {
	b := &bench{change: change, TB: t, compiler: standin.New(), state: filepath.Join(memoryDir(t), "state"), runtime: filepath.Join(t.TempDir(), "runtime")}
	b.library("1.0")
	b.open()
	t.Cleanup(func() {
		b.requireSound()
		b.close()
	})
	return b
}

// library replaces the runtime's EP library by another version.
func (b *bench) library(version string) {
	_, err := standin.Library(b.runtime, "1.31.1", standin.SDK{Version: version, Hardware: "sim-1"})
	require.NoError(b, err)
}

func (b *bench) open() {
	c, err := Open(b.state, b.options())
	require.NoError(b, err)
	b.cache = c
}

func (b *bench) options() Options {
	o := Options{Quiet: 20 * time.Millisecond, Drivers: b.drivers,
		Compiler: cmp.Or[compilers.Compiler](b.wrap, b.compiler), Runtimes: []compilers.Runtime{{Directory: b.runtime}},
		Now:     func() time.Time { return time.Now().Add(time.Duration(b.later.Load())) },
		Rebuild: RebuildOptions{Off: true}, Pack: PackOff, Policies: map[string]Policy{"": {MeasureGain: new(bool)}},
	}
	for ep, p := range b.policies {
		p.MeasureGain = new(bool)
		o.Policies[ep] = p
	}
	if b.change != nil {
		b.change(&o)
	}
	return o
}

func (b *bench) close() {
	if b.cache != nil {
		require.NoError(b, b.cache.Close())
		b.cache = nil
	}
}

func (b *bench) reopen() {
	b.close()
	b.open()
}

// requireSound checks the whole store: what is damaged must have been withheld before.
func (b *bench) requireSound() {
	if b.cache == nil {
		return
	}
	result, err := b.cache.Check(context.Background(), Peer{UID: b.cache.uid}, true, false, nil)
	require.NoError(b, err)
	for _, f := range result.Findings {
		for _, key := range f.Builds {
			for _, l := range b.list() {
				if l.Build.BuildKey == key {
					require.NotEqual(b, index.Current, l.State.Name, "finding %v of a build that would be served", f)
				}
			}
		}
	}
}

// model writes a model of its own content for each seed, and opens it.
func (b *bench) model(seed uint64) *os.File {
	path := filepath.Join(b.TempDir(), "model.onnx")
	require.NoError(b, os.WriteFile(path, tinymodel.Dense(seed, 8, 1), 0o644))
	return b.openFile(path)
}

func (b *bench) openFile(path string) *os.File {
	f, err := os.Open(path)
	require.NoError(b, err)
	b.Cleanup(func() { f.Close() })
	return f
}

func (b *bench) request(graph *os.File) *Request {
	return &Request{Peer: Peer{UID: uint32(os.Getuid())}, Name: filepath.Base(graph.Name()), Graph: graph, EPs: []EP{{Name: standin.EP}}}
}

func (b *bench) acquire(r *Request) *Answer {
	b.Helper()
	a, err := b.cache.Acquire(context.Background(), r, nil)
	require.NoError(b, err)
	if a.View != nil {
		b.Cleanup(func() { a.View.Close() })
	}
	return a
}

func (b *bench) refused(r *Request) *Error {
	b.Helper()
	a, err := b.cache.Acquire(context.Background(), r, nil)
	require.Nil(b, a)
	require.Error(b, err)
	var e *Error
	require.ErrorAs(b, err, &e)
	return e
}

func (b *bench) list() []Listing {
	page, _, err := b.cache.List(context.Background(), Peer{UID: b.cache.uid}, ListFilter{})
	require.NoError(b, err)
	return page
}

// read gives the digest of every file that an answer's view holds, through its descriptor alone.
func (b *bench) read(a *Answer) map[string]string {
	b.Helper()
	out := make(map[string]string)
	folder := fmt.Sprintf("/proc/self/fd/%d/%s", a.View.Fd(), filepath.Dir(a.Graph))
	entries, err := os.ReadDir(folder)
	require.NoError(b, err)
	for _, e := range entries {
		f, err := os.Open(filepath.Join(folder, e.Name()))
		require.NoError(b, err)
		h := sha256.New()
		_, err = io.Copy(h, f)
		require.NoError(b, err)
		f.Close()
		out[e.Name()] = fmt.Sprintf("%x", h.Sum(nil))
	}
	return out
}

func TestSecondRequestHits(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	require.Equal(t, Compiled, first.Outcome)
	second := b.acquire(b.request(b.model(1)))
	require.Equal(t, Hit, second.Outcome)
	require.Equal(t, first.RequestKey, second.RequestKey)
	require.Equal(t, b.read(first), b.read(second))
	require.Equal(t, compilers.Optimal, second.Compatibility.Verdict)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

func TestHitSurvivesRestart(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	files := b.read(first)
	b.reopen()
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, Hit, again.Outcome)
	require.Equal(t, files, b.read(again))
	require.Equal(t, first.Graph, again.Graph, "the view of the earlier run is sound, and serves on")
	require.EqualValues(t, 1, b.compiler.Fingerprints.Load(), "what was probed outlives the daemon")
}

func TestOneCompileForAll(t *testing.T) {
	b := newBench(t)
	b.compiler.Delay = 200 * time.Millisecond
	var wg sync.WaitGroup
	answers := make([]*Answer, 8)
	for i := range answers {
		r := b.request(b.model(1))
		wg.Go(func() {
			a, err := b.cache.Acquire(context.Background(), r, nil)
			if err == nil {
				answers[i] = a
			}
		})
	}
	wg.Wait()
	compiled := 0
	for _, a := range answers {
		require.NotNil(t, a)
		defer a.View.Close()
		require.Equal(t, answers[0].Graph, a.Graph)
		if a.Outcome == Compiled {
			compiled++
		}
	}
	require.Equal(t, 1, compiled)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

func TestFirstAskerLeaves(t *testing.T) {
	b := newBench(t)
	b.compiler.Delay = 300 * time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan error, 1)
	r := b.request(b.model(1))
	go func() {
		_, err := b.cache.Acquire(ctx, r, nil)
		first <- err
	}()
	require.Eventually(t, func() bool { return b.compiler.Compiles.Load() == 1 }, soon, time.Millisecond)
	second := make(chan *Answer, 1)
	r2 := b.request(b.model(1))
	go func() {
		a, err := b.cache.Acquire(context.Background(), r2, nil)
		if err == nil {
			second <- a
		}
		close(second)
	}()
	require.Eventually(t, func() bool { return b.waiters() == 2 }, soon, time.Millisecond)
	cancel()
	require.Equal(t, Cancelled, ClassOf(<-first))
	a := <-second
	require.NotNil(t, a)
	defer a.View.Close()
	require.Equal(t, Waited, a.Outcome)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

// waiters counts those who wait for compiles, and not for what has to be found out before, which the daemon does by itself at its start.
func (b *bench) waiters() int {
	fs := &b.cache.flights
	fs.mu.Lock()
	defer fs.mu.Unlock()
	n := 0
	for _, f := range fs.open {
		f.mu.Lock()
		if !f.about.inquiry {
			n += len(f.waiters)
		}
		f.mu.Unlock()
	}
	return n
}

func TestLastAskerCancels(t *testing.T) {
	b := newBench(t)
	b.compiler.Delay = time.Minute
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := b.cache.Acquire(ctx, b.request(b.model(1)), nil)
	require.Equal(t, Deadline, ClassOf(err))
	require.Eventually(t, func() bool { return b.cache.flights.count() == 0 }, soon, time.Millisecond)
	require.Eventually(t, func() bool {
		entries, err := os.ReadDir(filepath.Join(b.state, "staging"))
		return err == nil && len(entries) == 0
	}, soon, time.Millisecond)
}

func TestOnMiss(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.OnMiss = Fail
	require.Equal(t, NotFound, b.refused(r).Class)
	r.OnMiss = KeyOnly
	key := b.acquire(r)
	require.Equal(t, Key, key.Outcome)
	require.Nil(t, key.View)
	require.Contains(t, key.Record, standin.EP)
	r.OnMiss = Wait
	first := b.acquire(r)
	require.Equal(t, key.RequestKey, first.RequestKey)
	require.NotZero(t, first.Build.BuildKey)
	r.OnMiss = Refresh
	fresh := b.acquire(r)
	require.Equal(t, Compiled, fresh.Outcome)
	require.NotEqual(t, first.Graph, fresh.Graph, "a new build has a new view")
	require.Equal(t, b.read(first), b.read(fresh), "who holds the old view goes on with it")
	require.Len(t, b.list(), 1, "the new build has taken the old one's place")
	r.OnMiss = Bypass
	alone := b.acquire(r)
	require.Equal(t, Compiled, alone.Outcome)
	require.Equal(t, b.read(fresh), b.read(alone))
	require.EqualValues(t, 3, b.compiler.Compiles.Load())
	require.Len(t, b.list(), 1, "nothing of a bypass is kept")
}

func TestUnkeptGoesWithItsHolder(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.Store = "none"
	a := b.acquire(r)
	require.Empty(t, b.list())
	b.later.Store(int64(time.Hour))
	b.cache.sweepViews()
	require.NotEmpty(t, b.read(a), "held")
	require.NoError(t, a.View.Close())
	b.cache.sweepViews()
	require.NoDirExists(t, a.Path)
}

func TestIdentity(t *testing.T) {
	b := newBench(t)
	base := func() *Request { return b.request(b.model(1)) }
	key := func(change func(*Request)) index.RequestKey {
		r := base()
		r.OnMiss = KeyOnly
		change(r)
		return b.acquire(r).RequestKey
	}
	plain := key(func(*Request) {})
	same := map[string]func(*Request){
		"another name":             func(r *Request) { r.Name = "other.onnx" },
		"device spelled out":       func(r *Request) { r.EPs[0].Devices = devices("cpu") },
		"default level spelled":    func(r *Request) { r.GraphOptimizationLevel = "basic" },
		"default route spelled":    func(r *Request) { r.Route = "compile_api" },
		"session default spelled":  func(r *Request) { r.SessionOptions = map[string]string{"session.disable_quant_qdq": "False"} },
		"another user":             func(r *Request) { r.Peer.UID = 4711 },
		"a time in the past":       func(r *Request) { require.NoError(t, os.Chtimes(r.Graph.Name(), time.Unix(1, 0), time.Unix(1, 0))) },
		"the runtime spelled out":  func(r *Request) { r.Runtime.Directory = b.runtime },
		"the library by its path":  func(r *Request) { r.Runtime.EPLibraries = b.libraries(nil) },
		"the library as a file":    func(r *Request) { r.Runtime.EPLibraries = b.libraries(b.openFile(b.libraries(nil)[0].Path)) },
		"another scope than usual": func(r *Request) { r.Store = "user" },
		"fallback spelled out":     func(r *Request) { r.SessionOptions = map[string]string{"session.disable_cpu_ep_fallback": "0"} },
	}
	for name, change := range same {
		require.Equal(t, plain, key(change), name)
	}
	other := map[string]func(*Request){
		"one weight":        func(r *Request) { r.Graph = b.model(2) },
		"embedded":          func(r *Request) { r.Embed = true },
		"level":             func(r *Request) { r.GraphOptimizationLevel = "disable_all" },
		"a session's level": func(r *Request) { r.GraphOptimizationLevel = "all" }, // not the compile API's default
		"session option":    func(r *Request) { r.SessionOptions = map[string]string{"session.disable_quant_qdq": "1"} },
		"free dimension":    func(r *Request) { r.FreeDimensions = map[string]int64{"batch": 1} },
		"by denotation":     func(r *Request) { r.FreeDimensionsByDenotation = map[string]int64{"batch": 1} },
		"other route":       func(r *Request) { r.Route = "session_options" },
		"provider option":   func(r *Request) { r.EPs[0].Options = map[string]string{"fault": "slow"} },
		"dimension is two":  func(r *Request) { r.FreeDimensions = map[string]int64{"batch": 2} },
		"another dimension": func(r *Request) { r.FreeDimensions = map[string]int64{"length": 1} },
		"complete":          func(r *Request) { r.Output.Complete = true },
		"prefix":            func(r *Request) { r.Output.NodeNamePrefix = "left_" },
		"another prefix":    func(r *Request) { r.Output.NodeNamePrefix = "right_" },
		"weights outside":   func(r *Request) { r.Output.InitializersFile = "rest.bin" },
		"another file":      func(r *Request) { r.Output.InitializersFile = "weights.bin" },
		"large ones only":   func(r *Request) { r.Output = Output{InitializersFile: "rest.bin", InitializersThreshold: 100} },
		"in the source":     func(r *Request) { r.Output.InitializersInSource = true },
	}
	seen := map[index.RequestKey]string{plain: "plain"}
	for name, change := range other {
		k := key(change)
		require.Empty(t, seen[k], "%s has the key of another", name)
		seen[k] = name
	}
}

// ONNX Runtime does not tell small letters of a denotation from large ones.
func TestDenotationsInOtherLetters(t *testing.T) {
	b := newBench(t)
	key := func(sizes map[string]int64) index.RequestKey {
		r := b.request(b.model(1))
		r.OnMiss, r.FreeDimensionsByDenotation = KeyOnly, sizes
		return b.acquire(r).RequestKey
	}
	require.Equal(t, key(map[string]int64{"DATA_BATCH": 2}), key(map[string]int64{"data_batch": 2}))
	require.NotEqual(t, key(map[string]int64{"DATA_BATCH": 2}), key(map[string]int64{"DATA_CHANNEL": 2}))
	r := b.request(b.model(1))
	r.FreeDimensionsByDenotation = map[string]int64{"DATA_BATCH": 2, "data_batch": 3}
	require.Equal(t, BadRequest, b.refused(r).Class)
}

func (b *bench) libraries(f *os.File) []EPLibraryRef {
	found, err := filepath.Glob(filepath.Join(b.runtime, "libonnxruntime_providers_*.so"))
	require.NoError(b, err)
	require.Len(b, found, 1)
	return []EPLibraryRef{{EP: standin.EP, Path: found[0], File: f}}
}

func TestAnotherLibraryIsAnotherBuild(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	b.library("2.0")
	second := b.acquire(b.request(b.model(1)))
	require.Equal(t, Compiled, second.Outcome)
	require.Contains(t, second.Why, "SDK 1.0")
	require.Contains(t, second.Why, "2.0, asked about")
	require.Contains(t, second.Why, "unsupported")
	require.Equal(t, first.RequestKey, second.RequestKey)
	require.NotEqual(t, first.Build.BuildKey, second.Build.BuildKey)
	b.library("1.0")
	back := b.acquire(b.request(b.model(1)))
	require.Equal(t, Hit, back.Outcome, "the earlier build serves again when the SDK is back")
	require.Equal(t, b.read(first), b.read(back))
}

func TestDamageIsNeverServed(t *testing.T) {
	damages := map[string]func(t *testing.T, path string){
		"flipped bit": func(t *testing.T, path string) {
			require.NoError(t, os.Chmod(path, 0o644))
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			var one [1]byte
			_, err = f.ReadAt(one[:], 40)
			require.NoError(t, err)
			one[0] ^= 1
			_, err = f.WriteAt(one[:], 40)
			require.NoError(t, err)
		},
		"truncated": func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, 10)) },
		"emptied":   func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, 0)) },
		"deleted":   func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) },
		"replaced": func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.WriteFile(path, []byte("something else"), 0o444))
		},
	}
	for name, damage := range damages {
		for _, running := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/running=%v", name, running), func(t *testing.T) {
				b := newBench(t)
				first := b.acquire(b.request(b.model(1)))
				files := b.read(first)
				for i := range first.Build.Files {
					if !running {
						b.close()
					}
					d := b.current(first.Build.Files[i].Digest)
					damage(t, d)
					if !running {
						b.open()
					}
					healed := b.acquire(b.request(b.model(1)))
					require.Equal(t, files, b.read(healed), "what is served has the right bytes")
					again := b.acquire(b.request(b.model(1)))
					require.Equal(t, Hit, again.Outcome)
					require.Equal(t, files, b.read(again))
				}
			})
		}
	}
}

// current is the path of a blob in the store.
func (b *bench) current(d cas.Digest) string {
	path := filepath.Join(b.state, "objects", d.String()[:2], d.String())
	if _, err := os.Stat(path); err != nil {
		found, err := filepath.Glob(filepath.Join(b.state, "objects", "*", "*"+d.String()[2:]))
		require.NoError(b, err)
		require.Len(b, found, 1)
		path = found[0]
	}
	return path
}

func TestViewRepairedUnderANewID(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	inner := filepath.Join(first.Path, filepath.Dir(first.Graph))
	require.NoError(t, os.Chmod(inner, 0o755))
	require.NoError(t, os.Remove(filepath.Join(inner, first.Build.Files[1].Name)))
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, Hit, again.Outcome, "the blob is sound: only the view has to be made anew")
	require.NotEqual(t, first.Graph, again.Graph)
	require.Len(t, b.read(again), 2)
}

func TestRemove(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	files := b.read(a)
	me := Peer{UID: b.cache.uid}
	would, freed, err := b.cache.Remove(context.Background(), me, []string{"model.onnx"}, false, true)
	require.NoError(t, err)
	require.Len(t, would.Builds, 1)
	require.Len(t, b.list(), 1, "a dry run changes nothing")
	_, really, err := b.cache.Remove(context.Background(), me, []string{"model.onnx"}, false, false)
	require.NoError(t, err)
	require.Equal(t, freed, really)
	require.Positive(t, freed)
	require.Empty(t, b.list())
	require.Equal(t, files, b.read(a), "who holds the view goes on with it")
	require.NoError(t, a.View.Close())
	b.cache.sweepViews()
	require.NoDirExists(t, a.Path)
	require.Equal(t, Compiled, b.acquire(b.request(b.model(1))).Outcome)
	_, _, err = b.cache.Remove(context.Background(), me, []string{"nothing-like-that"}, false, false)
	require.Equal(t, NotFound, ClassOf(err))
}

func TestInvalidate(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	_, err := b.cache.Invalidate(context.Background(), Peer{UID: b.cache.uid}, []string{a.RequestKey.String()[:12]}, "looks wrong", false)
	require.NoError(t, err)
	b.reopen()
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, Compiled, again.Outcome)
	require.Contains(t, again.Why, "looks wrong")
}

func TestScopes(t *testing.T) {
	b := newBench(t)
	alice, bob := Peer{UID: 4001}, Peer{UID: 4002}
	private := func(p Peer, seed uint64) *Request {
		r := b.request(b.model(seed))
		require.NoError(t, os.Chmod(r.Graph.Name(), 0o600))
		r.Peer = p
		return r
	}
	shared := func(p Peer, seed uint64) *Request {
		r := b.request(b.model(seed))
		r.Peer = p
		return r
	}
	require.Equal(t, "uid:4001", b.acquire(private(alice, 1)).Build.Scope)
	require.Equal(t, Compiled, b.acquire(private(bob, 1)).Outcome, "another user's private build is no hit")
	require.Equal(t, "shared", b.acquire(shared(alice, 2)).Build.Scope)
	require.Equal(t, Hit, b.acquire(private(bob, 2)).Outcome, "whoever has the bytes gets what is shared")
	page, _, err := b.cache.List(context.Background(), alice, ListFilter{})
	require.NoError(t, err)
	require.Len(t, page, 2)
	b.acquire(shared(bob, 3))
	page, _, err = b.cache.List(context.Background(), alice, ListFilter{})
	require.NoError(t, err)
	require.Len(t, page, 2, "a shared build that alice never had is not listed to her")
	_, err = b.cache.Invalidate(context.Background(), alice, []string{page[0].Build.BuildKey.String()}, "", false)
	if page[0].Build.Scope == "shared" {
		require.Equal(t, NotAllowed, ClassOf(err))
	} else {
		require.NoError(t, err)
	}
}

func TestSecondCacheOnOneState(t *testing.T) {
	b := newBench(t)
	_, err := Open(b.state, Options{Compiler: b.compiler})
	var locked *LockedError
	require.ErrorAs(t, err, &locked)
	require.Equal(t, fmt.Sprintf("process %d", os.Getpid()), locked.Holder)
}

func TestAskingForTheKeyFirst(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.OnMiss = KeyOnly
	b.acquire(r)
	r.OnMiss = Wait
	require.NotZero(t, b.acquire(r).Build.BuildKey, "a plan that was made for its key lacks the build key")
}

func TestBlobsOfANewerVersionStay(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	b.close()
	manifest := filepath.Join(b.state, "manifests", a.Build.ID.String()[:2], a.Build.ID.String())
	text, err := os.ReadFile(manifest)
	require.NoError(t, err)
	require.NoError(t, os.Remove(manifest))
	text[8] = 0xff // the version, see doc/format.md
	newer := index.BuildID{1, 2, 3}.String()
	require.NoError(t, os.WriteFile(filepath.Join(b.state, "manifests", newer[:2], newer), text, 0o600))
	b.open()
	require.False(t, b.cache.index.Complete())
	removed, err := b.cache.forms.Remove(a.Build.Files[1].Digest)
	require.NoError(t, err)
	require.Zero(t, removed, "after an upgrade is taken back, the newer version's builds are not this one's to judge")
	require.NoError(t, b.cache.removeLeftovers(context.Background()))
	require.True(t, b.cache.cas.Has(a.Build.Files[1].Digest))
}
