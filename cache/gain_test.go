package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// measuring is a bench that measures what compiling gains, and rebuilds nothing.
func measuring(t testing.TB, load, source float64, change func(*Options)) *bench {
	b := newBenchWith(t, func(o *Options) {
		o.Policies = nil // by default it is measured
		if change != nil {
			change(o)
		}
	})
	b.compiler.LoadSeconds, b.compiler.SourceSeconds, b.compiler.CompileSeconds = load, source, 60
	return b
}

// measured waits until the source of the only build is measured.
func (b *bench) measured() Gain {
	b.Helper()
	require.Eventually(b, func() bool { return b.list()[0].Gain.SourceLoad > 0 }, soon, time.Millisecond)
	return b.list()[0].Gain
}

func (b *bench) staged() []os.DirEntry {
	entries, err := os.ReadDir(filepath.Join(b.state, "staging"))
	require.NoError(b, err)
	return entries
}

func TestGainIsMeasured(t *testing.T) {
	b := measuring(t, 0.25, 8, nil)
	first := b.acquire(b.request(b.model(1)))
	require.Equal(t, Gain{Load: 0.25, SourceLoad: 8}, b.measured())
	require.Eventually(t, func() bool { return len(b.staged()) == 0 }, soon, time.Millisecond, "the copy is gone")
	require.EqualValues(t, 1, b.compiler.SourceChecks.Load())
	require.Empty(t, b.list()[0].Build.Warnings)
	require.Empty(t, b.acquire(b.request(b.model(1))).Warnings)
	require.NotContains(t, first.Why, "gain")
	b.reopen()
	require.Equal(t, Gain{Load: 0.25, SourceLoad: 8}, b.list()[0].Gain, "it is remembered")
}

func TestLossIsSaid(t *testing.T) {
	b := measuring(t, 2, 0.5, nil)
	b.acquire(b.request(b.model(1)))
	b.measured()
	want := []string{"compiling gained nothing: the compiled model loads in 2.000 s, the source model in 0.500 s"}
	require.Equal(t, want, b.list()[0].Build.Warnings)
	hit := b.acquire(b.request(b.model(1)))
	require.Equal(t, Hit, hit.Outcome)
	require.Equal(t, want, hit.Warnings)
}

// A machine that is busy with something else keeps the measurement waiting, and the application would not have waited.
func TestTheSourceTakesNoLongerThanItsCompile(t *testing.T) {
	b := measuring(t, 0.25, 280, nil)
	b.acquire(b.request(b.model(1)))
	require.Equal(t, Gain{Load: 0.25, SourceLoad: 60}, b.measured())
	require.InDelta(t, 280, sourceLoad(&index.Build{CompileSeconds: 60, Route: compilers.RouteCommand}, 280), 0, "another program compiled it")
}

func TestLosses(t *testing.T) {
	for name, c := range map[string]struct {
		g     Gain
		loses bool
	}{
		"not measured": {Gain{Load: 1}, false},
		"faster":       {Gain{Load: 1, SourceLoad: 2}, false},
		"as good":      {Gain{Load: 1.04, SourceLoad: 1}, false},
		"slower":       {Gain{Load: 1.1, SourceLoad: 1}, true},
	} {
		require.Equal(t, c.loses, c.g.Loses(), name)
	}
}

func TestNotMeasuredWhereItIsNotWanted(t *testing.T) {
	b := measuring(t, 1, 2, func(o *Options) { o.Policies = map[string]Policy{"": {MeasureGain: new(bool)}} })
	b.acquire(b.request(b.model(1)))
	require.Equal(t, Gain{Load: 1}, b.list()[0].Gain, "the load check is made all the same")
	require.Empty(t, b.cache.gains.todo)
	require.Empty(t, b.staged())
}

// slowSource is a compiler whose loads of source models do not end by themselves at first.
type slowSource struct {
	compilers.Compiler
	begun chan struct{}
	fast  chan struct{} // closed: they do
}

func (s *slowSource) Check(ctx context.Context, job compilers.CheckJob) (compilers.CheckResult, error) {
	if job.Source {
		s.begun <- struct{}{}
		select {
		case <-s.fast:
		case <-ctx.Done():
			return compilers.CheckResult{}, ctx.Err()
		}
	}
	return s.Compiler.Check(ctx, job)
}

func TestACompileEndsAMeasurement(t *testing.T) {
	s := &slowSource{begun: make(chan struct{}, 16), fast: make(chan struct{})}
	b := measuring(t, 1, 2, func(o *Options) { s.Compiler, o.Compiler = o.Compiler, s })
	b.acquire(b.request(b.model(1)))
	<-s.begun
	require.Equal(t, Compiled, b.acquire(b.request(b.model(2))).Outcome)
	<-s.begun // of one or the other, from the beginning
	close(s.fast)
	require.Eventually(t, func() bool {
		for _, l := range b.list() {
			if l.Gain.SourceLoad == 0 {
				return false
			}
		}
		return true
	}, soon, time.Millisecond)
	require.EqualValues(t, 2, b.compiler.SourceChecks.Load())
}

func TestCloseEndsAMeasurement(t *testing.T) {
	s := &slowSource{begun: make(chan struct{}, 16), fast: make(chan struct{})}
	b := measuring(t, 1, 2, func(o *Options) { s.Compiler, o.Compiler = o.Compiler, s })
	b.acquire(b.request(b.model(1)))
	<-s.begun
	b.close()
	require.Empty(t, b.staged())
	left := filepath.Join(b.state, "staging", "gain-of-a-crash")
	require.NoError(t, os.Mkdir(left, 0o700))
	b.open()
	require.NoDirExists(t, left)
	require.Equal(t, Gain{Load: 1}, b.list()[0].Gain)
}

// Where there is no room for the private copy to wait, the kept source is copied again.
func TestMeasuredFromTheKeptSource(t *testing.T) {
	for _, how := range []string{KeepReference, KeepCopy, KeepNone} {
		t.Run(how, func(t *testing.T) {
			s := &slowSource{begun: make(chan struct{}, 16), fast: make(chan struct{})}
			b := measuring(t, 1, 2, func(o *Options) {
				s.Compiler, o.Compiler = o.Compiler, s
				o.KeepSource = how
			})
			b.acquire(b.request(b.model(1)))
			<-s.begun
			b.acquire(b.external(2, nil)) // while it is compiled, the first waits again
			<-s.begun
			b.cache.gains.giveUp()
			close(s.fast)
			b.cache.gains.wake()
			measured := func() (n int) {
				for _, l := range b.list() {
					if l.Gain.SourceLoad > 0 {
						n++
					}
				}
				return n
			}
			if how == KeepNone {
				require.Eventually(t, func() bool { return measured() == 1 && !b.cache.gains.busy() }, soon, time.Millisecond)
				require.Empty(t, b.cache.gains.todo)
				return
			}
			require.Eventually(t, func() bool { return measured() == 2 }, soon, time.Millisecond)
			require.Eventually(t, func() bool { return len(b.staged()) == 0 }, soon, time.Millisecond)
		})
	}
}

// What waits to be measured has no copy on the disk: there is that of the one which is measured, and none where it would take what is to stay free.
func TestWhatWaitsToBeMeasuredTakesNoRoom(t *testing.T) {
	s := &slowSource{begun: make(chan struct{}, 16), fast: make(chan struct{})}
	b := measuring(t, 1, 2, func(o *Options) {
		s.Compiler, o.Compiler = o.Compiler, s
		o.KeepSource = KeepNone
	})
	b.acquire(b.external(1, nil)) // which has to be copied to be compiled
	<-s.begun
	for seed := uint64(2); seed <= 4; seed++ {
		b.acquire(b.external(seed, nil))
		<-s.begun // of whichever: the compile has ended the measurement
		require.Eventually(t, func() bool { return len(b.staged()) == 1 }, soon, time.Millisecond)
	}
	settings := *b.cache.settings.Load()
	settings.space.Floor = Amount{Percent: 100}
	b.cache.settings.Store(&settings)
	close(s.fast)
	require.Eventually(t, func() bool {
		b.cache.gains.mu.Lock()
		defer b.cache.gains.mu.Unlock()
		return len(b.cache.gains.todo) == 0 && b.cache.gains.stop == nil
	}, soon, time.Millisecond)
	require.EqualValues(t, 1, b.compiler.SourceChecks.Load(), "for the others there was no room")
	require.Empty(t, b.staged())
}

func TestWhatCompilesFastIsNotKept(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Policies = map[string]Policy{"": {MinCompileSeconds: 0.2}} })
	fast := b.acquire(b.request(b.model(1)))
	require.Equal(t, Compiled, fast.Outcome)
	require.Contains(t, fast.Why, "min_compile_seconds, 0.2 s: not kept")
	require.NotEmpty(t, b.read(fast))
	require.Empty(t, b.list())
	b.compiler.Delay = 250 * time.Millisecond
	require.NotContains(t, b.acquire(b.request(b.model(2))).Why, "min_compile_seconds")
	require.Len(t, b.list(), 1)
}

func TestWhatIsTooOldIsServedAndMadeAnew(t *testing.T) {
	b := rebuilding(t, func(o *Options) { o.Policies = map[string]Policy{"": {MaxAge: time.Hour, MeasureGain: new(bool)}} })
	first := b.acquire(b.request(b.model(1)))
	b.later.Add(int64(time.Hour + time.Minute))
	old := b.acquire(b.request(b.model(1)))
	require.Equal(t, Hit, old.Outcome)
	require.Equal(t, first.Build.ID, old.Build.ID)
	require.Empty(t, b.settles())
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, Hit, again.Outcome)
	require.NotEqual(t, first.Build.ID, again.Build.ID)
	require.Empty(t, b.settles())
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}
