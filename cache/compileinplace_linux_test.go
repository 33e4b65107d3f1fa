package cache

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

// givenModels is a stand-in that records how its models were given to it, and calls functions
// around one compile.
type givenModels struct {
	*standin.Compiler
	before, after func() // once, when the model is there; nil: nothing

	mu        sync.Mutex
	originals []bool // of each compile; guarded by mu
}

func (g *givenModels) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	g.mu.Lock()
	g.originals = append(g.originals, job.ModelFile != nil)
	before, after := g.before, g.after
	g.before, g.after = nil, nil
	g.mu.Unlock()
	if before != nil {
		if job.Ready != nil {
			<-job.Ready
		}
		before()
	}
	result, err := g.Compiler.Compile(ctx, job, progress)
	if after != nil {
		after()
	}
	return result, err
}

// newOriginals makes a bench with models that did not change for an hour, so that they are not
// copied.
func newOriginals(t *testing.T) (*bench, *givenModels) {
	if !onBelievableFS(t) {
		t.Skip("SKIPPED: the temporary directory is on a file system whose times are not believed")
	}
	b := newBench(t)
	b.later.Store(int64(time.Hour))
	g := &givenModels{Compiler: b.compiler}
	b.close()
	b.wrap = g
	b.open()
	return b, g
}

func TestOriginalIsCompiledInPlaceWhereItsStampIsBelieved(t *testing.T) {
	b, g := newOriginals(t)
	b.later.Store(0)
	r := b.request(b.model(1))
	first := b.acquire(r)
	require.Equal(t, []bool{false}, g.originals, "a file that was just written is copied")

	b.later.Store(int64(time.Hour))
	r.OnMiss = request.Refresh
	again := b.acquire(r)
	require.Equal(t, []bool{false, true}, g.originals)
	require.Equal(t, b.read(first), b.read(again))

	g.originals = nil
	b.acquire(b.external(1, nil))
	require.Equal(t, []bool{false}, g.originals, "a model of several files is copied")
}

// writes are ways in which other bytes get into a model, and whether there is a model afterwards.
var writes = map[string]struct {
	write func(t *testing.T, path string)
	model bool
}{
	"written": {func(t *testing.T, path string) {
		require.NoError(t, os.WriteFile(path, compilertest.Dense(2, 8, 1), 0o644))
	}, true},
	"written, time put back": {func(t *testing.T, path string) {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, compilertest.Dense(2, 8, 1), 0o644))
		require.NoError(t, os.Chtimes(path, info.ModTime(), info.ModTime()))
	}, true},
	"truncated": {func(t *testing.T, path string) {
		require.NoError(t, os.Truncate(path, 100))
	}, false},
	"stored through a mapping": {func(t *testing.T, path string) {
		copy(mapping(t, path), compilertest.Dense(2, 8, 1))
	}, true},
}

// mapping maps a model for writing until the end of the test.
func mapping(t *testing.T, path string) []byte {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	size := len(compilertest.Dense(2, 8, 1))
	mapped, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(mapped)) })
	return mapped
}

// ticked waits until the file system's clock has moved since the file was changed. Without the
// bench's clock two seconds would have passed.
func ticked(t *testing.T, f *os.File) {
	before, err := cas.StampOf(f)
	require.NoError(t, err)
	probe := filepath.Join(t.TempDir(), "probe")
	require.Eventually(t, func() bool {
		require.NoError(t, os.WriteFile(probe, nil, 0o600))
		info, err := os.Stat(probe)
		require.NoError(t, err)
		return info.ModTime().UnixNano() > before.Ctime
	}, soon, time.Millisecond)
}

// alone returns what a private copy of the model at a path gives in another store.
func (b *bench) alone(path string) map[string]string {
	b.Helper()
	content, err := os.ReadFile(path)
	require.NoError(b, err)
	fresh := filepath.Join(b.TempDir(), "fresh.onnx")
	require.NoError(b, os.WriteFile(fresh, content, 0o644))
	r := b.request(b.openFile(fresh))
	r.OnMiss = request.Bypass
	return b.read(b.acquire(r))
}

// A build is never stored under the digest of other bytes than it was compiled from.
func TestModelWrittenDuringItsCompileIsNotStored(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(writes)) {
		c := writes[name]
		t.Run(name, func(t *testing.T) {
			b, g := newOriginals(t)
			r := b.request(b.model(1))
			path := r.Graph.Name()
			g.before = func() {
				ticked(t, r.Graph)
				c.write(t, path)
			}
			require.Equal(t, apierr.BadModel, b.refused(r).Class)
			require.Equal(t, []bool{true, false}, g.originals,
				"it is compiled once more, from a copy")
			require.Empty(t, b.list())
			if c.model {
				a := b.acquire(b.request(b.openFile(path)))
				require.Equal(t, b.alone(path), b.read(a), "the build is that of the new bytes")
			}
		})
	}
}

// A mapping that was there, and dirty, before the model was hashed leaves no way around the stamp.
func TestModelStoredThroughAnEarlierMappingIsNotStored(t *testing.T) {
	b, g := newOriginals(t)
	r := b.request(b.model(1))
	mapped := mapping(t, r.Graph.Name())
	copy(mapped, compilertest.Dense(1, 8, 1))
	g.before = func() {
		ticked(t, r.Graph)
		copy(mapped, compilertest.Dense(2, 8, 1))
	}
	require.Equal(t, apierr.BadModel, b.refused(r).Class)
	require.Equal(t, []bool{true, false}, g.originals)
	require.Empty(t, b.list())
}

// The bytes that were keyed are there again after the compile, which read others.
func TestModelWrittenForTheTimeOfItsCompile(t *testing.T) {
	b, g := newOriginals(t)
	r := b.request(b.model(1))
	path := r.Graph.Name()
	want := b.alone(path)
	g.originals = nil
	g.before = func() {
		ticked(t, r.Graph)
		require.NoError(t, os.WriteFile(path, compilertest.Dense(2, 8, 1), 0o644))
	}
	g.after = func() { require.NoError(t, os.WriteFile(path, compilertest.Dense(1, 8, 1), 0o644)) }
	require.Equal(t, want, b.read(b.acquire(r)))
	require.Equal(t, []bool{true, false}, g.originals)
}

// A write to a model after its copy does not change its compile.
func TestCopiedModelWrittenDuringItsCompile(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(writes)) {
		t.Run(name, func(t *testing.T) {
			b, g := newOriginals(t)
			b.later.Store(0)
			r := b.request(b.model(1))
			path := r.Graph.Name()
			want := b.alone(path)
			g.originals = nil
			g.before = func() { writes[name].write(t, path) }
			require.Equal(t, want, b.read(b.acquire(r)))
			require.Equal(t, []bool{false}, g.originals)
		})
	}
}

// A process that opens a model for writing, or has it open, and does not write, delays no compile.
func TestModelOpenForWritingIsCompiledInPlace(t *testing.T) {
	b, g := newOriginals(t)
	r := b.request(b.model(1))
	g.before = func() {
		f, err := os.OpenFile(r.Graph.Name(), os.O_RDWR, 0)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
	}
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
	require.Equal(t, []bool{true}, g.originals)
}

// The file that was sent counts, wherever its name leads by now. Its stamp does not show that only
// its names changed, so it is compiled again, from a copy.
func TestOriginalLosesItsName(t *testing.T) {
	for name, lose := range map[string]func(path string) error{
		"removed": os.Remove,
		"another in its place": func(path string) error {
			other := path + ".other"
			if err := os.WriteFile(other, compilertest.Dense(2, 8, 1), 0o644); err != nil {
				return err
			}
			return os.Rename(other, path)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, g := newOriginals(t)
			r := b.request(b.model(1))
			want := b.alone(r.Graph.Name())
			g.originals = nil
			g.before = func() {
				ticked(t, r.Graph)
				require.NoError(t, lose(r.Graph.Name()))
			}
			require.Equal(t, want, b.read(b.acquire(r)))
			require.Equal(t, []bool{true, false}, g.originals)
		})
	}
}
