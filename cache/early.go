package cache

import (
	"context"

	"github.com/epcached/epcached/compilers"
)

// early are the workers of a job, started before there is anything for them to do: one gets ready while the model is copied,
// the other while it is compiled. Of a group, whose files are not known before, none is.
type early struct {
	j         *job
	cancel    context.CancelFunc
	copied    chan struct{} // closed when the model is there
	made      chan struct{} // closed when the graph is there
	compiling func() compiling
	loading   func() loading // nil: no worker waits for the graph
}

type compiling struct {
	result compilers.Result
	err    error
}

type loading struct {
	result compilers.CheckResult
	err    error
}

func (j *job) startEarly(ctx context.Context, spec compilers.Job) *early {
	e := &early{j: j, cancel: func() {}, copied: make(chan struct{}), made: make(chan struct{})}
	if j.request.models() > 1 {
		return e
	}
	ctx, e.cancel = context.WithCancel(ctx)
	spec.Ready = e.copied
	e.compiling = alongside(func() compiling {
		result, err := j.compileTwice(ctx, spec)
		return compiling{result, err}
	})
	if !compilers.Weightless(spec.SessionOptions) { // else the graph tells what the worker is to be given
		e.loading = alongside(func() loading {
			result, err := j.loadGraphs(ctx, spec.Folder, compilers.Result{Graph: spec.Output}, spec.SessionOptions, e.made)
			return loading{result, err}
		})
	}
	return e
}

// compile goes on when the models are copied.
func (e *early) compile(ctx context.Context, spec compilers.Job) (compilers.Result, error) {
	if e.compiling == nil {
		return e.j.compileTwice(ctx, spec)
	}
	close(e.copied)
	out := e.compiling()
	return out.result, out.err
}

// load goes on when the graphs are made.
func (e *early) load(ctx context.Context, folder string, result compilers.Result, options map[string]string) (compilers.CheckResult, error) {
	if e.loading == nil {
		return e.j.loadGraphs(ctx, folder, result, options, nil)
	}
	close(e.made)
	out := e.loading()
	return out.result, out.err
}

// end waits for the workers that are not needed any more.
func (e *early) end() {
	e.cancel()
	if e.compiling != nil {
		e.compiling()
	}
	if e.loading != nil {
		e.loading()
	}
}
