package build

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
)

// earlyWorkers are the workers of a job, started before there is anything for them to do: one
// starts while the model is copied, the other while it is compiled, after a short delay. A group
// has none, because its files are not known before.
type earlyWorkers struct {
	j            *Job
	cancel       context.CancelFunc
	copied       chan struct{} // closed when the model is there
	compileBegun chan struct{} // closed when it is being compiled
	compiled     chan struct{} // closed when the graph is there
	reportPhase  func()        // closes made
	loadsAhead   atomic.Bool   // that was before the compile had ended
	compiling    func() (compilers.Result, error)
	loading      func() (compilers.CheckResult, error) // nil: no worker waits for the graph
}

// earlyLoadDelay is how long a compile has to go on before a worker is started that will load what
// it makes: many that fail do so at once.
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
	// A weightless graph says what the worker that loads it is given.
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

// awaitCompileOrEnd returns when the compile has gone on for a moment, or is done with.
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

// compile continues when the models are copied.
func (e *earlyWorkers) compile(ctx context.Context, spec compilers.Job) (compilers.Result, error) {
	if e.compiling == nil {
		return e.j.compileTwice(ctx, spec, func(string) {})
	}
	close(e.copied)
	return e.compiling()
}

// load continues when the graphs are there.
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

// maxLoadAhead is the size of an artefact, in bytes, that is loaded while the worker that compiled
// it is still there, with all that it has in memory. A larger one has to wait: what would be saved
// is some milliseconds.
const maxLoadAhead = 128 << 20

// loadWritten has the graph loaded while the worker that wrote it frees its memory.
func (e *earlyWorkers) loadWritten(size int64) {
	if size > maxLoadAhead || isOpen(e.j.urgent) {
		return
	}
	e.loadsAhead.Store(true)
	e.reportPhase()
}

// peakMemory is what the workers took at most, in bytes: the one that loads waits beside the one
// that compiles, and takes the most after it.
func (e *earlyWorkers) peakMemory(compiled int64, checked compilers.CheckResult) int64 {
	if e.loadsAhead.Load() {
		return compiled + checked.MaxRSS
	}
	return max(compiled+checked.ReadyRSS, checked.MaxRSS)
}

// end waits for the workers that are not needed any more.
func (e *earlyWorkers) end() {
	e.cancel()
	if e.compiling != nil {
		_, _ = e.compiling() // of no interest any more
	}
	if e.loading != nil {
		_, _ = e.loading()
	}
}
