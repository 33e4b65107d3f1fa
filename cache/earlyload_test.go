package cache

import (
	"cmp"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
)

// outlasting is a compiler with workers that write their output and run on, until the output has
// been loaded if loads is set.
type outlasting struct {
	*standin.Compiler
	t       *testing.T
	size    int64 // bytes that it reports
	settled bool
	loads   bool
	dies    bool                    // the first worker, after that
	copies  bool                    // models are copied
	first   compilers.CheckResult   // of the first load check; "": what it finds
	checked chan compilers.CheckJob // gets each load check when it is done
}

const compileTakes, loadTakes, readyTakes = 100 << 20, 60 << 20, 40 << 20 // bytes

func (o *outlasting) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	result, err := o.Compiler.Compile(ctx, job, progress)
	result.MaxRSS = compileTakes
	if err != nil || job.Written == nil {
		return result, err
	}
	job.Written(o.size)
	if o.loads {
		select {
		case <-o.checked:
		case <-time.After(2 * time.Minute):
			o.t.Error("the graph is not loaded")
		}
	}
	if o.dies {
		o.dies, o.loads = false, false
		return compilers.Result{},
			&compilers.ExitError{Compiler: standin.EP, Code: -1, Signal: "aborted", Name: "SIGABRT"}
	}
	result.Settled = o.settled
	return result, nil
}

func (o *outlasting) AcceptsOpenModel(job compilers.Job) bool {
	return !o.copies &&
		o.Compiler.AcceptsOpenModel(job)
}

func (o *outlasting) Check(ctx context.Context, job compilers.CheckJob) (compilers.CheckResult,
	error) {
	result, err := o.Compiler.Check(ctx, job)
	if err != nil {
		return result, err
	}
	if o.Checks.Load() == 1 && o.first.Outcome != "" {
		result = o.first
		result.GraphOptimizationLevel = cmp.Or(o.first.GraphOptimizationLevel,
			job.GraphOptimizationLevel)
	}
	result.ReadyRSS, result.MaxRSS = readyTakes, loadTakes
	o.checked <- job
	return result, nil
}

// Output is loaded while the worker that wrote it still runs; the result counts only if the output
// cannot change after that. ahead is the largest artefact, in bytes, that is loaded before the
// worker that compiled it ends.
const ahead = 128 << 20

func TestLoadedBeforeTheWorkerIsGone(t *testing.T) {
	const beside, apart = compileTakes + loadTakes, compileTakes + readyTakes
	for name, c := range map[string]struct {
		edit   func(*outlasting)
		later  bool // no request waits
		checks int64
		memory int64
	}{
		"settled": {checks: 1, memory: beside},
		"written to afterwards": {edit: func(o *outlasting) { o.settled = false }, checks: 2,
			memory: apart},
		"the worker dies": {edit: func(o *outlasting) { o.dies = true }, checks: 2,
			memory: beside},
		"it dies over a copy": {edit: func(o *outlasting) { o.dies, o.copies = true, true },
			checks: 2, memory: apart},
		"the load fails": {edit: func(o *outlasting) {
			o.first = compilers.CheckResult{Outcome: compilers.Failed, Code: 1, Text: "cut off"}
		}, checks: 2, memory: apart},
		"without optimisation": {edit: func(o *outlasting) {
			o.first = compilers.CheckResult{Outcome: compilers.Passed,
				GraphOptimizationLevel: "disable_all"}
		}, checks: 2, memory: apart},
		"too large": {edit: func(o *outlasting) { o.size, o.loads = ahead+1, false }, checks: 1,
			memory: apart},
		"nobody waits": {edit: func(o *outlasting) { o.loads = false }, later: true, checks: 1,
			memory: apart},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			// the models' times are believed, so they are not copied
			b.later.Store(int64(time.Hour))
			o := &outlasting{Compiler: b.compiler, t: t, size: ahead, settled: true, loads: true,
				checked: make(chan compilers.CheckJob, 8)}
			if c.edit != nil {
				c.edit(o)
			}
			b.close()
			b.wrap = o
			b.open()
			r := b.request(b.model(1))
			if c.later {
				r.OnMiss = request.Background
				b.follow(r.Peer.UID, b.acquire(r).Job)
				r = b.request(b.model(1))
			}
			a := b.acquire(r)
			require.Equal(t, compilers.Passed, a.Build.LoadCheck)
			require.Empty(t, a.GraphOptimizationLevel)
			require.Equal(t, c.checks, o.Checks.Load())
			memory, _ := b.cache.jobs.Costs.Estimate(b.factsOf(1).Kind())
			require.Equal(t, c.memory, memory)
		})
	}
}

// The source's files are put beside the graph when the worker is gone.
func TestNotLoadedBeforeTheSourceIsThere(t *testing.T) {
	b := newBench(t)
	o := &outlasting{Compiler: b.compiler, t: t, size: 1, settled: true, loads: true,
		checked: make(chan compilers.CheckJob, 8)}
	b.close()
	b.wrap = o
	b.open()
	r := b.request(b.model(1))
	r.Output.InitializersInSource = true
	b.acquire(r)
	require.Len(t, o.checked, 1, "nothing was reported, and no compile waited for it")
}
