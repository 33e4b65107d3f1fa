package compilers

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/epcached/epcached/compilers/dialogue"
)

// StandBy implements Standing. Workers of another user get the way to their model before they start, so there are none of those.
func (o *ORT) StandBy(r Runtime, eps []EP, folder, models string) (*Standby, error) {
	if o.opts.User != nil {
		return nil, errors.ErrUnsupported
	}
	req, err := standbyRequest(r, eps, models)
	if err != nil {
		return nil, err
	}
	end, err := o.launcher.begin()
	if err != nil {
		return nil, err
	}
	private := filepath.Join(folder, privateFolder)
	if err := o.makePrivate(private); err != nil {
		end()
		return nil, err
	}
	w, err := o.start(req, folder, nil)
	if err != nil {
		o.drop(private)
		end()
		return nil, fmt.Errorf("%w: %q: %w", ErrStart, o.opts.Worker, err)
	}
	s := &Standby{req: req, folder: folder, models: models, limits: o.opts.Limits, given: make(chan struct{}), gone: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	w.converse(req, s.given, func() error { return dialogue.WriteRequest(w.request, s.order()) }, s.heard)
	go func() {
		defer close(s.gone)
		defer end()
		defer o.drop(private)
		defer s.cancel(nil)
		w.wait(s.ctx, func(int, <-chan struct{}) {})
		s.answer, s.err = w.result(s.ctx, compilerName(req), o.opts.Limits, w.group.end())
	}()
	return s, nil
}

// work is ORT.work with this worker. errNotBegun: it ended before it began the job, by whatever cause.
func (s *Standby) work(ctx context.Context, req dialogue.Request, pace Pace, progress func(string)) (answer, error) {
	if !await(ctx, pace.Ready) {
		return answer{}, context.Cause(ctx)
	}
	if !s.take(spelled(req, filepath.Join(s.folder, privateFolder)), progress) {
		return answer{}, errNotBegun
	}
	stop := context.AfterFunc(ctx, func() { s.cancel(context.Cause(ctx)) })
	defer stop()
	go limitTime(s.ctx, compilerName(req), s.limits.Wall, nil, s.cancel)
	stopWatch := watchOutput(s.folder, s.limits.Output, s.cancel)
	<-s.gone
	stopWatch()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil && !s.begun && ctx.Err() == nil {
		return answer{}, errNotBegun
	}
	return s.answer, s.err
}

// compile has a compile's request done by the worker that stands by for it, or by a new one. What nobody waits for is done at the lowest priority,
// at which that one does not run.
func (o *ORT) compile(ctx context.Context, req dialogue.Request, job Job, progress func(string)) (answer, error) {
	if s := job.Standby; s != nil {
		if !waits(job.Idle) && s.suits(req, job) {
			done, err := s.work(ctx, req, job.Pace, progress)
			if !errors.Is(err, errNotBegun) {
				return done, err
			}
			o.opts.Log.Debug("the worker that stood by is gone; another is started")
		}
		s.Close() // the job's folder has room for one
	}
	return o.work(ctx, req, job.Folder, job.Pace, progress)
}
