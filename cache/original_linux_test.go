package cache

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/witness"
)

// givenModels is a stand-in that tells how its models were given to it, and does something while it has one.
type givenModels struct {
	*standin.Compiler
	during func() // once, while it compiles; nil: nothing

	mu        sync.Mutex
	originals []bool // of each compile; guarded by mu
}

func (g *givenModels) Compile(ctx context.Context, job compilers.Job, progress func(string)) (compilers.Result, error) {
	g.mu.Lock()
	g.originals = append(g.originals, job.ModelFile != nil)
	during := g.during
	g.during = nil
	g.mu.Unlock()
	if during != nil {
		if job.Ready != nil {
			<-job.Ready
		}
		during()
	}
	return g.Compiler.Compile(ctx, job, progress)
}

// newOriginals makes a bench whose compiles take a while, for models that were just written.
func newOriginals(t *testing.T) (*bench, *givenModels) {
	b := newBench(t)
	f, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer f.Close()
	if !witness.CanBeGuarded(f) {
		t.Skip("SKIPPED: the temporary folder is on a file system whose files cannot be guarded")
	}
	g := &givenModels{Compiler: b.compiler}
	b.compiler.Delay = 300 * time.Millisecond
	b.close()
	b.wrap = g
	b.open()
	return b, g
}

func requireNothingGuarded(t *testing.T, b *bench) {
	require.True(t, b.cache.guards.Idle())
}

func TestAnOriginalIsNotCopied(t *testing.T) {
	b, g := newOriginals(t)
	first := b.acquire(b.request(b.model(1)))
	require.Equal(t, []bool{true}, g.originals, "it is guarded since before it was hashed")
	requireNothingGuarded(t, b)

	b.later.Store(int64(time.Hour))
	old := b.request(b.model(1))
	old.OnMiss = KeyOnly // which has it hashed, and remembered
	b.acquire(old)
	old.OnMiss = Refresh
	again := b.acquire(old)
	require.Equal(t, []bool{true, onBelievableFS(t)}, g.originals, "its stamp is believed")
	require.Equal(t, b.read(first), b.read(again))

	g.originals = nil
	copied := b.external(1, nil)
	b.acquire(copied)
	require.Equal(t, []bool{false}, g.originals, "what is more than one file")
}

// Whoever wants to write waits no longer than it takes us to notice, and what was being compiled counts for nothing.
func TestWriterInTheMiddleOfACompile(t *testing.T) {
	other := tinymodel.Dense(2, 8, 1)
	for name, c := range map[string]struct {
		write   func(path string) error
		written bool // the model is another one then
	}{
		"other bytes": {func(path string) error { return os.WriteFile(path, other, 0o644) }, true},
		"truncated":   {func(path string) error { return os.Truncate(path, 100) }, true},
		"opened only": {func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			return f.Close()
		}, false},
		"through a mapping": {func(path string) error {
			return storeThroughMapping(path, other)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			b, g := newOriginals(t)
			r := b.request(b.model(1))
			var waited time.Duration
			g.during = func() {
				began := time.Now()
				require.NoError(t, c.write(r.Graph.Name()))
				waited = time.Since(began)
			}
			if c.written {
				require.Equal(t, refusal.BadModel, b.refused(r).Class)
				require.Empty(t, b.list())
			} else {
				a := b.acquire(r)
				require.Equal(t, Compiled, a.Outcome)
			}
			require.Equal(t, []bool{true, false}, g.originals, "it begins again with a copy")
			require.Less(t, waited, 30*time.Second, "the kernel makes a writer wait for 45 s where nobody lets go")
			requireNothingGuarded(t, b)

			if name == "truncated" {
				return // there is no model any more
			}
			b.compiler.Delay = 0
			a := b.acquire(b.request(b.openFile(r.Graph.Name())))
			fresh := filepath.Join(t.TempDir(), "fresh.onnx")
			bytes, err := os.ReadFile(r.Graph.Name())
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(fresh, bytes, 0o644))
			alone := b.request(b.openFile(fresh))
			alone.OnMiss = Bypass
			require.Equal(t, b.read(b.acquire(alone)), b.read(a), "what is served is what those bytes give")
		})
	}
}

func storeThroughMapping(path string, bytes []byte) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	mapped, err := unix.Mmap(int(f.Fd()), 0, len(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	copy(mapped, bytes)
	return unix.Munmap(mapped)
}

// A writer that was there first keeps the model from being guarded, and the copy is what counts.
func TestWriterFromBeforeACompile(t *testing.T) {
	b, g := newOriginals(t)
	r := b.request(b.model(1))
	alone := b.read(b.acquire(b.request(b.model(1))))
	g.originals = nil
	f, err := os.OpenFile(r.Graph.Name(), os.O_RDWR, 0)
	require.NoError(t, err)
	mapped, err := unix.Mmap(int(f.Fd()), 0, len(tinymodel.Dense(2, 8, 1)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mapped)) }()
	require.NoError(t, f.Close())
	g.during = func() { copy(mapped, tinymodel.Dense(2, 8, 1)) }
	r.OnMiss = Refresh
	require.Equal(t, alone, b.read(b.acquire(r)))
	require.Equal(t, []bool{false}, g.originals)
}

// A stamp that is believed is compared too: the change ends the compile.
func TestChangeOfAnOldModelInTheMiddleOfACompile(t *testing.T) {
	if !onBelievableFS(t) {
		t.Skip("SKIPPED: the temporary folder is on a file system whose times are not believed")
	}
	b, g := newOriginals(t)
	b.compiler.Delay = 5 * time.Minute
	b.later.Store(int64(time.Hour))
	r := b.request(b.model(1))
	g.during = func() {
		require.NoError(t, os.WriteFile(r.Graph.Name(), tinymodel.Dense(2, 8, 1), 0o644))
	}
	began := time.Now()
	require.Equal(t, refusal.BadModel, b.refused(r).Class)
	require.Less(t, time.Since(began), b.compiler.Delay, "the change ended it")
	require.Equal(t, []bool{true, false}, g.originals)
	require.Empty(t, b.list())
}

// The file that was sent counts, wherever its name leads by now.
func TestOriginalLosesItsName(t *testing.T) {
	for name, lose := range map[string]func(path string) error{
		"removed": os.Remove,
		"another in its place": func(path string) error {
			other := path + ".other"
			if err := os.WriteFile(other, tinymodel.Dense(2, 8, 1), 0o644); err != nil {
				return err
			}
			return os.Rename(other, path)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, g := newOriginals(t)
			alone := b.read(b.acquire(b.request(b.model(1))))
			r := b.request(b.model(1))
			r.OnMiss = Refresh
			g.originals = nil
			g.during = func() { require.NoError(t, lose(r.Graph.Name())) }
			require.Equal(t, alone, b.read(b.acquire(r)))
			require.Equal(t, []bool{true}, g.originals)
		})
	}
}
