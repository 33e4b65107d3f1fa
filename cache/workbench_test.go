package cache

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cas/crashfs"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// bench is a cache over the stand-in compiler, with one runtime, in temporary directories.
type bench struct {
	testing.TB
	cache    *Cache
	compiler *standin.Compiler
	wrap     compilers.Compiler // nil: compiler itself
	state    string
	runtime  string
	policies map[string]request.Policy
	drivers  []runtimes.DriverSource
	later    atomic.Int64 // nanoseconds, added to the cache's clock
	change   func(*Options)
}

// memoryDir makes a directory in memory, if that can be: hundreds of stores are made here, each of
// 512 directories that are synced, and what a power cut takes away is tested elsewhere.
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
	b := unopenedBench(t)
	b.change = change
	b.openSound()
	return b
}

// newBenchOf has no daemon before the one with the compiler that wrap returns, because what an
// earlier one has found out of the runtime in the background is remembered.
func newBenchOf(t testing.TB, wrap func(*standin.Compiler) compilers.Compiler) *bench {
	b := unopenedBench(t)
	b.wrap = wrap(b.compiler)
	b.openSound()
	return b
}

func unopenedBench(t testing.TB) *bench {
	b := &bench{TB: t, compiler: standin.New(),
		state: filepath.Join(memoryDir(t), "state"), runtime: filepath.Join(t.TempDir(), "runtime")}
	b.library("1.0")
	return b
}

// openSound opens the store for the first time, and checks it at the end.
func (b *bench) openSound() {
	b.open()
	b.Cleanup(func() {
		b.requireSound()
		b.close()
	})
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

const stranger = 4242 // an ordinary user

func (b *bench) options() Options {
	o := Options{Quiet: 20 * time.Millisecond, Drivers: b.drivers,
		Compiler: cmp.Or[compilers.Compiler](b.wrap, b.compiler),
		Runtimes: []compilers.Runtime{{Directory: b.runtime}},
		Now:      func() time.Time { return time.Now().Add(time.Duration(b.later.Load())) },
		Rebuild:  upkeep.RebuildOptions{Off: true}, Pack: store.PackOff,
		Policies: map[string]request.Policy{"": {MeasureGain: new(bool)}},
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

// copies closes the bench. The returned function makes another one with a copy of its store at each
// call, and does not open it, because filling a store takes longer.
func (b *bench) copies() func(t testing.TB) *bench {
	b.Helper()
	b.close()
	made, err := crashfs.New(filepath.Dir(b.state))
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, made.Close()) })
	return func(t testing.TB) *bench {
		root := memoryDir(t)
		require.NoError(t, made.Crash(root, crashfs.Nothing, 0)) // a copy, with its holes
		c := &bench{TB: t, compiler: b.compiler, state: filepath.Join(root, "state"),
			runtime: b.runtime}
		c.later.Store(b.later.Load())
		return c
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
	result, err := b.cache.Check(context.Background(), request.Peer{UID: b.cache.uid},
		&wire.Check{Deep: true}, nil)
	require.NoError(b, err)
	for _, f := range result.Findings {
		for _, key := range f.Builds {
			for _, l := range b.list() {
				if l.row.Build == key {
					require.NotEqual(b, index.Current, l.row.State,
						"finding %v of a build that would be served", f)
				}
			}
		}
	}
}

// model writes a model of its own content for each seed, and opens it.
func (b *bench) model(seed uint64) *os.File {
	path := filepath.Join(b.TempDir(), "model.onnx")
	require.NoError(b, os.WriteFile(path, compilertest.Dense(seed, 8, 1), 0o644))
	return b.openFile(path)
}

func (b *bench) openFile(path string) *os.File {
	f, err := os.Open(path)
	require.NoError(b, err)
	b.Cleanup(func() { f.Close() })
	return f
}

func (b *bench) request(graph *os.File) *request.Request {
	return &request.Request{Peer: request.Peer{UID: uint32(os.Getuid())},
		Name: filepath.Base(graph.Name()), Graph: graph,
		CompileTerms: identity.CompileTerms{EPs: []identity.EP{{Name: standin.EP}}}}
}

func (b *bench) acquire(r *request.Request) *request.Answer {
	b.Helper()
	a, err := b.again(r)
	require.NoError(b, err)
	if a.View != nil {
		b.Cleanup(func() { a.View.Close() })
	}
	return a
}

// again asks as the socket does: an equal request may be answered without being decided again.
func (b *bench) again(r *request.Request) (*request.Answer, error) {
	own := *r
	own.Repetition = b.repetition(r)
	a := b.cache.Repeats.Answer(context.Background(), r.Peer, own.Repetition, nil)
	if a != nil {
		return a, nil
	}
	return b.cache.Acquire(context.Background(), &own, nil)
}

// repetition identifies a request with its open files.
func (b *bench) repetition(r *request.Request) string {
	var fds []int
	for _, f := range r.AllFiles() {
		fds = append(fds, int(f.Fd()))
	}
	for _, l := range r.Runtime.EPLibraries {
		if l.File != nil {
			fds = append(fds, int(l.File.Fd()))
		}
	}
	return b.cache.Repeats.Key(r.Peer, fmt.Sprintf("%+v", *r), fds)
}

// identified is the attempt that Acquire makes of the request, once its model is identified.
func (b *bench) identified(r *request.Request) *request.Attempt {
	b.Helper()
	at, err := request.NewAttempt(r, jobs.NewProgressReporter(nil, b.cache.now()))
	require.NoError(b, err)
	at, err = b.cache.planner.WithIdentity(context.Background(), at)
	require.NoError(b, err)
	return at
}

// planned is identified with the runtime and the plan.
func (b *bench) planned(r *request.Request) *request.Attempt {
	b.Helper()
	at := b.identified(r)
	rt, rc, err := b.cache.runtimes.Resolve(context.Background(), at.RuntimeWanted(), at.Phase)
	require.NoError(b, err)
	at, err = b.cache.planner.WithPlan(context.Background(), at.WithRuntime(rt.Name, rc))
	require.NoError(b, err)
	return at
}

func (b *bench) refused(r *request.Request) *apierr.Error {
	b.Helper()
	a, err := b.again(r)
	require.Nil(b, a)
	require.Error(b, err)
	var e *apierr.Error
	require.ErrorAs(b, err, &e)
	return e
}

// listed is a build as List reports it, and as it is stored.
type listed struct {
	Build index.Build
	row   *wire.Build
}

func (b *bench) list() (out []listed) {
	page, err := b.cache.Queries.List(context.Background(), request.Peer{UID: b.cache.uid},
		&wire.List{}, nil)
	require.NoError(b, err)
	require.Empty(b, page.Next)
	for _, row := range page.Builds {
		found, _ := b.cache.Queries.Find(context.Background(), b.self(), []string{row.Build})
		i := slices.IndexFunc(found, func(one index.Build) bool {
			return one.Scope == row.Scope && wire.Milliseconds(one.Created) == row.CreatedMs
		})
		if i >= 0 { // else it has gone meanwhile
			out = append(out, listed{found[i], row})
		}
	}
	return out
}

// read returns the digest of every file that an answer's view holds, through its descriptor alone.
func (b *bench) read(a *request.Answer) map[string]string {
	b.Helper()
	out := make(map[string]string)
	dir := fmt.Sprintf("/proc/self/fd/%d/%s", a.View.Fd(), filepath.Dir(a.Graph))
	entries, err := os.ReadDir(dir)
	require.NoError(b, err)
	for _, e := range entries {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		require.NoError(b, err)
		h := sha256.New()
		_, err = io.Copy(h, f)
		require.NoError(b, err)
		f.Close()
		out[e.Name()] = fmt.Sprintf("%x", h.Sum(nil))
	}
	return out
}

// waiters counts the callers that wait for compiles, not for inquiries, which the daemon makes by
// itself at its start.
func (b *bench) waiters() int {
	n := 0
	for _, j := range b.cache.jobs.List() {
		if waiting, _ := j.CountWatchers(); !j.Description().Inquiry {
			n += waiting
		}
	}
	return n
}

func (b *bench) libraries(f *os.File) []runtimes.LibraryRef {
	found, err := filepath.Glob(filepath.Join(b.runtime, "libonnxruntime_providers_*.so"))
	require.NoError(b, err)
	require.Len(b, found, 1)
	return []runtimes.LibraryRef{{EP: standin.EP, Path: found[0], File: f}}
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

// objectBytes sums the sizes of all whole blobs.
func (c *Cache) objectBytes(ctx context.Context) (sum int64, err error) {
	err = c.cas.Walk(ctx, func(_ cas.Digest, size, _ int64) error {
		sum += size
		return nil
	})
	return sum, err
}

// views takes every view away behind the cache's back, so that they are made again from the blobs.
func (b *bench) views() {
	b.Helper()
	found, err := filepath.Glob(filepath.Join(b.state, "views", "*", "*"))
	require.NoError(b, err)
	for _, dir := range found {
		require.NoError(b, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				return os.Chmod(path, 0o700)
			}
			return err
		}))
		require.NoError(b, os.RemoveAll(dir))
	}
}

// publish adds a build to the index with files that are blobs already.
func (b *bench) publish(build *index.Build) {
	b.Helper()
	c, err := b.cache.index.Stage(context.Background(), *build)
	require.NoError(b, err)
	b.cache.index.Commit([]*index.Change{c})
	require.NoError(b, c.Err)
}

// path is the path of a file in the state directory.
func (c *Cache) path(name ...string) string {
	return filepath.Join(append([]string{c.dir}, name...)...)
}

// remove removes a build.
func (b *bench) remove(build *index.Build) error {
	one := []store.Removal{{Build: build, Why: "a test"}}
	return errors.Join(b.cache.Store.RemoveAll(one), one[0].Err)
}
