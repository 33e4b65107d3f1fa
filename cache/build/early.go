package build

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
)

// early are the workers of a job, started before there is anything for them to do: one starts while
// the model is copied, the other while it is compiled, after a short delay. A group has none,
// because its files are not known before.
type early struct {
	j         *Job
	cancel    context.CancelFunc
	copied    chan struct{} // closed when the model is there
	begun     chan struct{} // closed when it is being compiled
	made      chan struct{} // closed when the graph is there
	tell      func()        // closes made
	ahead     atomic.Bool   // that was before the compile had ended
	compiling func() (compilers.Result, error)
	loading   func() (compilers.CheckResult, error) // nil: no worker waits for the graph
}

// compilesFor is how long a compile has to go on before a worker is started that will load what it
// makes: many that fail do so at once.
const compilesFor = 20 * time.Millisecond

func (j *Job) startEarly(ctx context.Context, spec compilers.Job, o *workspace.Original) *early {
	e := &early{j: j, cancel: func() {},
		copied: make(chan struct{}), begun: make(chan struct{}), made: make(chan struct{})}
	e.tell = sync.OnceFunc(func() { close(e.made) })
	if j.Request.Models() > 1 {
		return e
	}
	ctx, e.cancel = context.WithCancel(ctx)
	if o == nil {
		spec.Ready = e.copied
	}
	// A weightless graph says what the worker that loads it is given.
	weightless := compilers.Weightless(spec.SessionOptions)
	if !weightless && j.Plan.OnlyProcessors && !spec.Initializers.InSource {
		spec.Written = e.written
	}
	begin := sync.OnceFunc(func() { close(e.begun) })
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
			e.awaitCompile(ctx)
			if ctx.Err() != nil {
				return compilers.CheckResult{}, ctx.Err()
			}
			return j.loadGraphs(ctx, spec.Folder, compilers.Result{Graph: spec.Output},
				spec.SessionOptions, e.made)
		})
		go e.loading()
	}
	return e
}

// awaitCompile returns when the compile has gone on for a moment, or is done with.
func (e *early) awaitCompile(ctx context.Context) {
	select {
	case <-e.begun:
	case <-e.made:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-time.After(compilesFor):
	case <-e.made:
	case <-ctx.Done():
	}
}

// compile continues when the models are copied.
func (e *early) compile(ctx context.Context, spec compilers.Job) (compilers.Result, error) {
	if e.compiling == nil {
		return e.j.compileTwice(ctx, spec, func(string) {})
	}
	close(e.copied)
	return e.compiling()
}

// load continues when the graphs are there.
func (e *early) load(ctx context.Context, folder string, result compilers.Result,
	options map[string]string) (compilers.CheckResult, error) {
	if e.loading == nil {
		return e.j.loadGraphs(ctx, folder, result, options, nil)
	}
	e.tell()
	loaded, err := e.loading()
	if !e.ahead.Load() || result.Settled && err == nil && e.j.loads(loaded) {
		return loaded, err
	}
	// The early load may have met half-written files, or the device may have been busy with the
	// compile.
	e.ahead.Store(false)
	return e.j.loadGraphs(ctx, folder, result, options, nil)
}

// loadAhead is the size of an artefact, in bytes, that is loaded while the worker that compiled it
// is still there, with all that it has in memory. A larger one has to wait: what would be saved is
// some milliseconds.
const loadAhead = 128 << 20

// written has the graph loaded while the worker that wrote it takes apart what it was made from.
func (e *early) written(size int64) {
	if size > loadAhead || waits(e.j.urgent) {
		return
	}
	e.ahead.Store(true)
	e.tell()
}

// memory is what the workers took at most, in bytes: the one that loads waits beside the one that
// compiles, and takes the most after it.
func (e *early) memory(compiled int64, checked compilers.CheckResult) int64 {
	if e.ahead.Load() {
		return compiled + checked.MaxRSS
	}
	return max(compiled+checked.ReadyRSS, checked.MaxRSS)
}

// end waits for the workers that are not needed any more.
func (e *early) end() {
	e.cancel()
	if e.compiling != nil {
		_, _ = e.compiling() // of no interest any more
	}
	if e.loading != nil {
		_, _ = e.loading()
	}
}
