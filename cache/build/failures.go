package build

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// FailedBefore returns the remembered failure (the negative cache's) that answers the request
// instead of a compile, nil if there is none. Other users' failures count only for builds that all
// users share.
func (bd *Builder) FailedBefore(at *request.Attempt) *failure.Failure {
	if at.OnMiss == request.Bypass {
		return nil
	}
	for _, scope := range at.Scopes {
		key := at.Plan.FailureKey(at.Content, scope)
		f := bd.Failures.Lookup(key, at.Peer.UID, at.Name)
		switch {
		case f == nil:
		case at.OnMiss == request.Refresh && (bd.Rights.IsAdministrator(at.Peer) ||
			f.UID == at.Peer.UID || scope == rights.OwnScope(at.Peer)):
			bd.Failures.Forget(key)
		default:
			return f
		}
	}
	return nil
}

// prepareJob returns a function that makes the request's job, unless a stored build or a remembered
// failure answers it.
func (bd *Builder) prepareJob(at *request.Attempt, scope string) func() (jobs.Work, error) {
	return func() (jobs.Work, error) {
		if m := bd.WorkIfMade(at, scope); m != nil {
			return m, nil
		}
		if f := bd.FailedBefore(at); f != nil {
			return nil, f.RememberedError(at.Name)
		}
		return bd.NewJob(at, scope, Recompile{})
	}
}

// compileTwice compiles, and retries in a new worker if the machine may have killed the first one.
func (j *Job) compileTwice(ctx context.Context, spec compilers.Job, phase func(string)) (
	compilers.Result, error) {
	result, err := j.bd.Compiler.Compile(ctx, spec, phase)
	j.addCPU(result.CPUSeconds)
	died := errors.As(err, new(*compilers.ExitError)) && !errors.Is(err, compilers.ErrStart)
	if !died || j.workerDied || !j.mayRetry(ctx) {
		return result, err
	}
	j.bd.Log.Warn("a worker died; its compile is retried once",
		"model", j.Request.Name, "error", err)
	if j.workerDied = true; spec.ModelFile != nil {
		return result, err // the caller retries with a copy of the model
	}
	if err := emptyDir(spec.Dir); err != nil {
		return result, err
	}
	spec.Written = nil // an early load may have begun on the first worker's output
	result, err = j.bd.Compiler.Compile(ctx, spec, phase)
	j.addCPU(result.CPUSeconds)
	return result, err
}

// mayRetry reports whether the machine may have caused the death of a worker.
func (j *Job) mayRetry(ctx context.Context) bool {
	return ctx.Err() == nil && j.Content.IsCurrent() && !j.bd.closing.Load()
}

func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// failed decides the cause of a job's failure. It is remembered as the model's failure only if the
// control, the smallest possible model, compiles and loads in the same kind of process; otherwise
// the machine is the cause.
func (j *Job) failed(ctx context.Context, err error) error {
	var e *apierr.Error
	switch {
	case ctx.Err() != nil:
		return err // cancellation has an event of its own
	case errors.Is(err, runtimes.ErrFilesChanging):
		j.bd.Log.Info("a compile was ended because the runtime's libraries changed",
			"model", j.Request.Name)
		return err // no failure: the request repeats it
	case !errors.As(err, &e) || failure.FromError(e) == nil:
		return j.recordFailure("", err)
	}
	j.nameModel(e)
	f := failure.FromError(e)
	if j.bd.closing.Load() && f.Reason == failure.WorkerDied {
		// systemd may end the worker at the same time as the daemon.
		return apierr.New(apierr.Busy, err,
			"model %q: the daemon is stopping and has ended its compile", j.Request.Name)
	}
	if f.Reason.BlamesModel() {
		broken, err2 := j.controlFailure(ctx)
		switch {
		case ctx.Err() != nil:
			return apierr.FromContext(ctx, "model %q", j.Request.Name)
		case err2 != nil && runtimes.IsTransient(ctx, err2):
			return j.librariesReplaced()
		case err2 != nil:
			j.bd.Log.Warn("cannot test whether this runtime compiles at all", "error", err2)
			// the control failed too, so nothing is remembered
			return j.recordFailure(f.Reason, err)
		case broken != "":
			text := f.Text + "; but even the smallest model fails: " + broken
			here := failure.OfMachine(text).
				ToError(err, "model %q cannot be compiled here", j.Request.Name)
			j.nameModel(here)
			return j.recordFailure(failure.Sandbox, here)
		}
	}
	p := j.Plan
	f.RequestKey, f.BuildKey, f.ModelDigest = p.RequestKey, p.BuildKey, p.Canonical.Model
	f.UID, f.Scope, f.EP = j.Peer.UID, j.FailureScope(j.scope), p.EPs[0].Name
	if f.Scope != "" {
		j.bd.Failures.Remember(p.FailureKey(j.Content, f.Scope), f, j.bd.Settings().Failures)
	}
	return j.recordFailure(f.Reason, err)
}

// controlFailure compiles and loads the smallest model. It returns why that fails, "" if it
// succeeds. It waits for a slot as load checks do, because the job has left the queue already.
func (j *Job) controlFailure(ctx context.Context) (string, error) {
	leave, err := j.bd.Workspaces.AcquireSlot(ctx, j.Request)
	if err != nil {
		return "", err
	}
	defer leave()
	return j.bd.LoadChecker.Control(ctx, j.Plan.JudgeTarget("", j.Content))
}

// recordFailure counts a failure and writes it into the history. It does nothing for a background
// rebuild or a cancelled job, which are recorded elsewhere.
func (j *Job) recordFailure(reason failure.Reason, err error) error {
	if j.recompile.Why != "" || reason == failure.Cancelled {
		return err
	}
	j.bd.Store.Index().Counters.Add("failures", 1)
	j.bd.Log.Info("compile failed", "model", j.Request.Name, "error", err, "uid", j.Peer.UID)
	if j.bd.Failures.IsNew(j.Plan.RequestKey, j.Peer.UID, reason) {
		about := event.About{Peer: j.Peer, Key: j.Plan.RequestKey, Model: j.Request.Name}
		j.bd.Store.RecordEvent(event.For(about, event.Failed, "%v", err))
	}
	return err
}

// removeOwnNames replaces the paths of the job's private copy and directory in a failure by the
// user's.
func (j *Job) removeOwnNames(f *failure.Failure) {
	var pairs []string
	out := filepath.Join(j.Dir, outDir)
	for i := range j.Request.Models() {
		name := failure.ModelPlaceholder
		if j.Request.Models() > 1 {
			name = fmt.Sprintf("model %d of the group", i+1)
		}
		if i < len(j.Copies) {
			path := j.Copies[i].Path
			pairs = append(pairs, path, name, compilers.Spelling(out, path), name)
		}
		made := "the compiled " + name
		pairs = append(pairs, j.ModelPath(i), name, filepath.Join(out, j.MemberOutput(i)), made,
			filepath.Base(j.ModelPath(i)), name, j.MemberOutput(i), made)
	}
	models := j.ModelDir()
	for _, dir := range []string{out, models, compilers.Spelling(out, models), j.Dir} {
		pairs = append(pairs, dir+"/", "")
	}
	plain := strings.NewReplacer(pairs...) // the first pair that matches is used
	f.Text = plain.Replace(f.Text)
	for _, fact := range failure.CompilerWordFacts {
		if words, ok := f.Facts[fact]; ok {
			f.Facts[fact] = plain.Replace(words)
		}
	}
}

// nameModel puts the model's name, as in the request that began the job, into the failure.
func (j *Job) nameModel(e *apierr.Error) {
	f := failure.FromError(e)
	head, _ := strings.CutSuffix(e.Text, f.Text)
	j.removeOwnNames(f)
	f.ModelName = j.Request.Name
	named := f.ForName(f.ModelName)
	e.Text = head + named.Text
	maps.Copy(e.Facts, named.Facts)
}

// withAdvice adds hints to a failure: what to change in the request.
func (j *Job) withAdvice(err error) error {
	var e *apierr.Error
	if !errors.As(err, &e) || failure.FromError(e) == nil {
		return err
	}
	f := failure.FromError(e)
	j.addDimensionsHint(f)
	if j.Plan.Canonical.SessionOptions["session.disable_cpu_ep_fallback"] == "1" &&
		strings.Contains(f.Text, ortNoCPUText) {
		f.AddHint("without --complete (session.disable_cpu_ep_fallback) the CPU runs these " +
			"nodes, and the answer lists them")
	}
	for key, value := range f.Facts {
		e.WithFact(key, value)
	}
	e.Hint = f.Advice()
	return e
}

// ortNoCPUText is ONNX Runtime's error for a session that must leave no node to the CPU.
const ortNoCPUText = "fallback to CPU EP has been explicitly disabled"

// addDimensionsHint adds a hint if open dimensions may be the cause, because the execution provider
// refused the model or took none of its nodes.
func (j *Job) addDimensionsHint(f *failure.Failure) {
	if f.Reason != failure.NoNode && f.Reason != failure.Refused {
		return
	}
	var hints []string
	if vain := j.UnusedDimensions(); len(vain) > 0 {
		hints = append(hints, "no input of the model has a free dimension "+
			request.QuotedNames(vain))
	}
	if len(j.Open) > 0 {
		var names []string
		for _, d := range j.Open {
			if d.Name != "" {
				names = append(names, request.QuotedName(d.Name))
			}
		}
		hints = append(hints, request.DimensionsHint(j.Open))
		f.Facts["free_dimensions"] = strings.Join(names, ",")
	}
	if len(hints) > 0 {
		f.AddHint(strings.Join(hints, "; "))
	}
}
