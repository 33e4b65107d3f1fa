package build

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
)

// earlyWorkers are the workers of a job, started ahead of time to save their start-up: the compiler
// while the model is copied, the loader while it is compiled, after a short delay. A group has
// none, because its files are not known in advance.
type earlyWorkers struct {
	j            *Job
	cancel       context.CancelFunc
	copied       chan struct{} // closed when the model is copied
	compileBegun chan struct{} // closed when the compile begins
	compiled     chan struct{} // closed when the graph is written
	reportPhase  func()        // closes compiled
	loadsAhead   atomic.Bool   // the load began before the compile had ended
	compiling    func() (compilers.Result, error)
	loading      func() (compilers.CheckResult, error) // nil: no worker waits for the graph
}

// earlyLoadDelay is how long a compile runs before the worker is started that will load its result,
// because many failing compiles fail within that time.
const earlyLoadDelay = 20 * time.Millisecond

func (j *Job) startEarlyWorkers(ctx context.Context, spec compilers.Job,
	o *workspace.Original) *earlyWorkers {
	e := &earlyWorkers{j: j, cancel: func() {}, copied: make(chan struct{}),
		compileBegun: make(chan struct{}), compiled: make(chan struct{})}
	e.reportPhase = sync.OnceFunc(func() { close(e.compiled) })
	if j.Request.Models() > 1 {
		return e
	}
	ctx, e.cancel = context.WithCancel(ctx)
	if o == nil {
		spec.Ready = e.copied
	}
	// The loader of a weightless graph needs the files that the graph names, which are not known
	// yet.
	weightless := compilers.IsWeightless(spec.SessionOptions)
	if !weightless && j.Plan.OnlyProcessors && !spec.Initializers.InSource {
		spec.Written = e.loadWritten
	}
	begin := sync.OnceFunc(func() { close(e.compileBegun) })
	e.compiling = sync.OnceValues(func() (compilers.Result, error) {
		return j.compileTwice(ctx, spec, func(phase string) {
			if phase == compilers.PhaseCompiling {
				begin()
			}
		})
	})
	go e.compiling()
	if !weightless {
		e.loading = sync.OnceValues(func() (compilers.CheckResult, error) {
			e.awaitCompileOrEnd(ctx)
			if ctx.Err() != nil {
				return compilers.CheckResult{}, ctx.Err()
			}
			return j.loadGraphs(ctx, spec.Dir, compilers.Result{Graph: spec.Output},
				spec.SessionOptions, e.compiled)
		})
		go e.loading()
	}
	return e
}

// awaitCompileOrEnd returns when the compile has run for earlyLoadDelay, or when the job ends.
func (e *earlyWorkers) awaitCompileOrEnd(ctx context.Context) {
	select {
	case <-e.compileBegun:
	case <-e.compiled:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-time.After(earlyLoadDelay):
	case <-e.compiled:
	case <-ctx.Done():
	}
}

// compile hands the copied models to the waiting worker, or starts one.
func (e *earlyWorkers) compile(ctx context.Context, spec compilers.Job) (compilers.Result, error) {
	if e.compiling == nil {
		return e.j.compileTwice(ctx, spec, func(string) {})
	}
	close(e.copied)
	return e.compiling()
}

// load has the waiting worker load the graphs, or starts one.
func (e *earlyWorkers) load(ctx context.Context, dir string, result compilers.Result,
	options map[string]string) (compilers.CheckResult, error) {
	if e.loading == nil {
		return e.j.loadGraphs(ctx, dir, result, options, nil)
	}
	e.reportPhase()
	loaded, err := e.loading()
	if !e.loadsAhead.Load() || result.Settled && err == nil && e.j.loadsClean(loaded) {
		return loaded, err
	}
	// The early load may have met half-written files, or a device busy with the compile.
	e.loadsAhead.Store(false)
	return e.j.loadGraphs(ctx, dir, result, options, nil)
}

// maxLoadAhead is the largest artefact, in bytes, that is loaded before the worker that compiled it
// has exited and freed its memory. A larger one is loaded after that, because loading early saves
// only milliseconds.
const maxLoadAhead = 128 << 20

// loadWritten starts loading the graph while the worker that wrote it still frees its memory.
func (e *earlyWorkers) loadWritten(size int64) {
	if size > maxLoadAhead || isOpen(e.j.urgent) {
		return
	}
	e.loadsAhead.Store(true)
	e.reportPhase()
}

// peakMemory returns the most memory, in bytes, that the job's workers took at one time. If the
// load began before the compile had ended, both peaks count together; otherwise the loader counts
// beside the compiler only with what it took while it waited.
func (e *earlyWorkers) peakMemory(compiled int64, checked compilers.CheckResult) int64 {
	if e.loadsAhead.Load() {
		return compiled + checked.MaxRSS
	}
	return max(compiled+checked.ReadyRSS, checked.MaxRSS)
}

// end cancels workers that were not needed, and waits for them.
func (e *earlyWorkers) end() {
	e.cancel()
	if e.compiling != nil {
		_, _ = e.compiling() // cancelled, so its result is ignored
	}
	if e.loading != nil {
		_, _ = e.loading()
	}
}
