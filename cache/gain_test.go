package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/store"
)

// measuring is a bench that measures what compiling gains, and rebuilds nothing.
func measuring(t testing.TB, load, source float64, change func(*Options)) *bench {
	b := newBenchWith(t, func(o *Options) {
		o.Policies = nil // by default it is measured
		if change != nil {
			change(o)
		}
	})
	b.compiler.LoadCPU, b.compiler.AgainstCPU = load, source
	return b
}

func (b *bench) gain() upkeep.Gain { return b.cache.gains.ForBuild(b.list()[0].Build.ID) }

// measured waits until the only build is measured.
func (b *bench) measured() upkeep.Gain {
	b.Helper()
	require.Eventually(b, func() bool { return b.gain().SourceLoad > 0 }, soon, time.Millisecond)
	return b.gain()
}

func (b *bench) staged() []os.DirEntry {
	entries, err := os.ReadDir(filepath.Join(b.state, "staging"))
	require.NoError(b, err)
	return entries
}

func TestGainIsMeasured(t *testing.T) {
	b := measuring(t, 0.25, 8, nil)
	first := b.acquire(b.request(b.model(1)))
	require.Equal(t, upkeep.Gain{Load: 0.25, SourceLoad: 8}, b.measured())
	require.Eventually(t, func() bool { return len(b.staged()) == 0 }, soon, time.Millisecond,
		"the copy is removed")
	require.EqualValues(t, 1, b.compiler.LoadComparisons.Load())
	require.Empty(t, b.cache.gains.ForBuild(b.list()[0].Build.ID).Warnings())
	require.Empty(t, b.acquire(b.request(b.model(1))).Warnings)
	require.NotContains(t, first.Why, "gain")
	b.reopen()
	require.Equal(t, upkeep.Gain{Load: 0.25, SourceLoad: 8}, b.gain(), "it is remembered")
}

func TestNegativeGainIsReported(t *testing.T) {
	b := measuring(t, 2, 0.5, nil)
	b.acquire(b.request(b.model(1)))
	b.measured()
	want := []string{"compiling brought no gain: the compiled model takes 2s of processor " +
		"time to load, the source model 500ms"}
	require.Equal(t, want, b.cache.gains.ForBuild(b.list()[0].Build.ID).Warnings())
	hit := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, hit.Outcome)
	require.Equal(t, want, hit.Warnings)
}

func TestGainIsNotMeasuredWhereItIsSwitchedOff(t *testing.T) {
	b := measuring(t, 1, 2,
		func(o *Options) { o.Policies = map[string]request.Policy{"": {MeasureGain: new(bool)}} })
	b.acquire(b.request(b.model(1)))
	b.cache.gains.Wait()
	require.Zero(t, b.gain())
	require.Zero(t, b.compiler.LoadComparisons.Load())
	require.Empty(t, b.staged())
}

// slowComparison is a compiler that compares loads only when the test asks for it.
type slowComparison struct {
	compilers.Compiler
	begun chan struct{}
	fast  chan struct{} // closed: it does
}

func (s *slowComparison) Check(ctx context.Context,
	job compilers.CheckJob) (compilers.CheckResult, error) {
	if job.Against != "" {
		s.begun <- struct{}{}
		select {
		case <-s.fast:
		case <-ctx.Done():
			return compilers.CheckResult{}, ctx.Err()
		}
	}
	return s.Compiler.Check(ctx, job)
}

func comparingSlowly(t testing.TB, change func(*Options)) (*bench, *slowComparison) {
	s := &slowComparison{begun: make(chan struct{}, 16), fast: make(chan struct{})}
	return measuring(t, 1, 2, func(o *Options) {
		s.Compiler, o.Compiler = o.Compiler, s
		if change != nil {
			change(o)
		}
	}), s
}

// A measurement that a compile disturbed would be of a busy machine, and is not repeated.
func TestCompileEndsAMeasurement(t *testing.T) {
	b, s := comparingSlowly(t, nil)
	first := b.acquire(b.request(b.model(1)))
	<-s.begun
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(2))).Outcome)
	<-s.begun // of the second
	close(s.fast)
	b.cache.gains.Wait()
	for _, l := range b.list() {
		require.Equal(t, l.Build.ID == first.Build.ID, l.row.SourceLoadSeconds == 0)
	}
	require.EqualValues(t, 1, b.compiler.LoadComparisons.Load())
	require.Empty(t, b.staged())
}

// Nothing but time ends a measurement that gets no processor time, and its lease and copy with it.
func TestBusyMachineEndsAMeasurement(t *testing.T) {
	b, s := comparingSlowly(t, nil)
	b.cache.gains.Limit = 100 * time.Millisecond
	b.acquire(b.request(b.model(1)))
	ended := make(chan struct{})
	go func() {
		b.cache.gains.Wait()
		close(ended)
	}()
	select {
	case <-s.begun:
		<-ended
	case <-ended: // the limit passed before the comparison began
	}
	require.Zero(t, b.gain())
	require.Empty(t, b.staged())
}

func TestBuildRemovedDuringItsMeasurementLeavesNothing(t *testing.T) {
	b, s := comparingSlowly(t, nil)
	a := b.acquire(b.request(b.model(1)))
	require.NoError(t, a.View.Close())
	<-s.begun
	_, err := b.cache.Remove(context.Background(), request.Peer{}, nil, true, false)
	require.NoError(t, err)
	require.DirExists(t, a.Path, "the measurement has a lease")
	close(s.fast)
	b.cache.gains.Wait()
	require.NoDirExists(t, a.Path)
}

func TestCloseEndsAMeasurement(t *testing.T) {
	b, s := comparingSlowly(t, nil)
	b.acquire(b.request(b.model(1)))
	<-s.begun
	b.close()
	require.Empty(t, b.staged())
	left := filepath.Join(b.state, "staging", "gain-of-a-crash")
	require.NoError(t, os.Mkdir(left, 0o700))
	b.open()
	require.NoDirExists(t, left)
	require.Zero(t, b.gain())
}

func TestGainIsNotMeasuredOnAFullDisk(t *testing.T) {
	b := measuring(t, 1, 2, func(o *Options) { o.KeepSource = build.KeepNone })
	settings := b.cache.settings.Load().store
	settings.Space.Floor = store.Amount{Percent: 100}
	b.cache.Store.SetSettings(settings)
	b.acquire(b.request(b.model(1)))
	b.cache.gains.Wait()
	require.Zero(t, b.compiler.LoadComparisons.Load())
	require.Empty(t, b.staged())
}

func TestOldBuildIsServedAndRecompiled(t *testing.T) {
	b := rebuilding(t, func(o *Options) {
		o.Policies = map[string]request.Policy{"": {MaxAge: time.Hour, MeasureGain: new(bool)}}
	})
	first := b.acquire(b.request(b.model(1)))
	b.later.Add(int64(time.Hour + time.Minute))
	old := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, old.Outcome)
	require.Equal(t, first.Build.ID, old.Build.ID)
	require.Empty(t, b.waitForRebuilds())
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, again.Outcome)
	require.NotEqual(t, first.Build.ID, again.Build.ID)
	require.Empty(t, b.waitForRebuilds())
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}
