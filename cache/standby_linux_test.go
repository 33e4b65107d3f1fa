//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/requests"
)

// standing is ONNX Runtime, and tells of each job whether a worker stood by for it.
type standing struct {
	*compilers.ORT
	mu   sync.Mutex
	jobs []compilers.Job // of the models; guarded by mu
}

func (s *standing) Compile(ctx context.Context, job compilers.Job, progress func(string)) (compilers.Result, error) {
	if filepath.Base(job.Folder) == outFolder {
		s.mu.Lock()
		s.jobs = append(s.jobs, job)
		s.mu.Unlock()
	}
	return s.ORT.Compile(ctx, job, progress)
}

func (s *standing) last() *compilers.Standby {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[len(s.jobs)-1].Standby
}

func newStandbyBench(t *testing.T, change func(*Options)) (*bench, *standing) {
	ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	c := &standing{ORT: ort}
	r := compilers.Runtime{Directory: compilertest.TestEPRuntime(t, "1.31.1", compilertest.Release{SDK: "1.0.0"}).Directory}
	return newBenchWith(t, func(o *Options) {
		o.Compiler, o.Runtimes, o.Standby = c, []compilers.Runtime{r}, time.Minute
		if change != nil {
			change(o)
		}
	}), c
}

func (b *bench) compiled(seed uint64) *Answer {
	b.Helper()
	r := b.request(b.model(seed))
	r.EPs = []requests.EP{{Name: compilertest.TestEP, Devices: []compilers.Device{{Metadata: map[string]string{"device_id": "0"}}}}}
	a := b.acquire(r)
	require.Equal(b, Compiled, a.Outcome)
	return a
}

// standing waits until a worker stands by, and gives it.
func (b *bench) standing() (s *standby) {
	b.Helper()
	require.Eventually(b, func() bool {
		b.cache.standbys.mu.Lock()
		defer b.cache.standbys.mu.Unlock()
		s = b.cache.standbys.one
		return s != nil && s.worker != nil
	}, soon, time.Millisecond)
	return s
}

// left requires that a worker that stood by is gone with all that it had.
func (b *bench) left(s *standby) {
	b.Helper()
	require.Eventually(b, func() bool {
		_, err := os.Stat(s.folder)
		b.cache.standbys.mu.Lock()
		defer b.cache.standbys.mu.Unlock()
		return os.IsNotExist(err) && b.cache.standbys.one != s
	}, soon, time.Millisecond)
	select {
	case <-s.worker.Gone():
	default:
		require.Fail(b, "its process is there")
	}
}

func TestTheNextCompileHasAWorkerThatIsReady(t *testing.T) {
	b, c := newStandbyBench(t, nil)
	b.compiled(1)
	require.Nil(t, c.last())
	first := b.standing()
	b.compiled(2)
	require.Same(t, first.worker, c.last())
	b.left(first)
	second := b.standing()
	require.NotSame(t, first, second)
	b.close()
	require.Empty(t, b.staged())
	select {
	case <-second.worker.Gone():
	default:
		require.Fail(t, "a worker outlives the daemon")
	}
	b.open()
}

// slow takes as long to start a worker that stands by as the test lets it.
type slow struct {
	*standing
	starting chan struct{} // gets a value when one begins to start
	start    chan struct{} // closed when they may
	let      func()        // closes it
}

func (s *slow) StandBy(r compilers.Runtime, eps []compilers.EP, folder, models string) (*compilers.Standby, error) {
	s.starting <- struct{}{}
	<-s.start
	return s.standing.StandBy(r, eps, folder, models)
}

// Neither a compile nor a change of the libraries waits for a worker that is just starting.
func TestNobodyWaitsForAWorkerToStart(t *testing.T) {
	begin := func(t *testing.T) (*bench, *slow) {
		s := &slow{starting: make(chan struct{}, 4), start: make(chan struct{})}
		b, c := newStandbyBench(t, func(o *Options) { s.standing, o.Compiler = o.Compiler.(*standing), s })
		require.Same(t, c, s.standing)
		s.let = sync.OnceFunc(func() { close(s.start) })
		t.Cleanup(s.let) // before the daemon is closed, which waits for it
		b.compiled(1)
		<-s.starting
		return b, s
	}
	t.Run("a compile", func(t *testing.T) {
		b, s := begin(t)
		b.compiled(2)
		require.Nil(t, s.last())
		require.Empty(t, s.starting, "one is enough")
		s.let()
		first := b.standing()
		b.compiled(3)
		require.Same(t, first.worker, s.last())
	})
	t.Run("an update", func(t *testing.T) {
		b, s := begin(t)
		b.cache.standbys.dismiss()
		s.let()
		require.Eventually(t, func() bool { return len(b.staged()) == 0 }, soon, time.Millisecond, "it goes as soon as it has come")
		b.compiled(2)
		require.Nil(t, s.last())
	})
}

// What was loaded before an update is of no use after it.
func TestUpdateWhileAWorkerStandsBy(t *testing.T) {
	b, c := newStandbyBench(t, nil)
	before := b.compiled(1)
	s := b.standing()
	compilertest.InstallTestEP(t, s.rc.spec.Directory, compilertest.Release{SDK: "2.0.0"})
	after := b.compiled(2)
	require.NotSame(t, s.worker, c.last())
	require.Equal(t, []string{"1.0.0", "2.0.0"}, []string{before.Build.EPs[0].SDKVersion, after.Build.EPs[0].SDKVersion})
	b.left(s)
}

func TestAWorkerThatStandsByIsNotKept(t *testing.T) {
	t.Run("without use", func(t *testing.T) {
		b, _ := newStandbyBench(t, func(o *Options) { o.Standby = 300 * time.Millisecond })
		b.compiled(1)
		b.left(b.standing())
	})
	t.Run("when the libraries change", func(t *testing.T) {
		b, _ := newStandbyBench(t, nil)
		b.compiled(1)
		s := b.standing()
		compilertest.InstallTestEP(t, s.rc.spec.Directory, compilertest.Release{SDK: "2.0.0"})
		b.left(s) // though nobody asks
	})
	t.Run("dead", func(t *testing.T) {
		b, c := newStandbyBench(t, nil)
		b.compiled(1)
		s := b.standing()
		s.worker.Close()
		b.left(s)
		b.compiled(2)
		require.Nil(t, c.last())
	})
	t.Run("where a job needs its memory", func(t *testing.T) {
		b, c := newStandbyBench(t, func(o *Options) { o.JobsMemory = standbyMemory + 1<<20 })
		b.compiled(1)
		s := b.standing()
		b.compiled(2)
		require.Nil(t, c.last())
		b.left(s)
	})
	t.Run("where there is no memory", func(t *testing.T) {
		b, _ := newStandbyBench(t, func(o *Options) { o.JobsMemory = standbyMemory - 1 })
		b.compiled(1)
		require.Never(t, func() bool {
			b.cache.standbys.mu.Lock()
			defer b.cache.standbys.mu.Unlock()
			return b.cache.standbys.one != nil
		}, 200*time.Millisecond, 10*time.Millisecond)
	})
}
