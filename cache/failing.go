package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/trial"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// failedBefore gives the failure that the request is answered with instead of compiling, nil if it may be compiled. Other
// users' failures count only where what they compiled is everybody's.
func (c *Cache) failedBefore(at *request.Attempt) *failure.Failure {
	if at.OnMiss == request.Bypass || c.settings.Load().failures.Off {
		return nil
	}
	for _, scope := range at.Scopes {
		key := at.Plan.FailureKey(at.Content, scope)
		f := c.failures.Holds(key, at.Peer.UID, at.Name)
		if f == nil {
			continue
		}
		if at.OnMiss == request.Refresh && (c.rights.Administrator(at.Peer) || f.UID == at.Peer.UID || scope == rights.OwnScope(at.Peer)) {
			c.failures.Forget(key)
			continue
		}
		return f
	}
	return nil
}

// begin gives what starts the request's compile, unless that is answered from memory.
func (c *Cache) begin(at *request.Attempt, scope string) func() (jobs.Work, error) {
	return func() (jobs.Work, error) {
		if m := c.madeMeanwhile(at, scope); m != nil {
			return m, nil
		}
		if f := c.failedBefore(at); f != nil {
			return nil, f.FromMemory(at.Name)
		}
		return c.newJob(at, scope)
	}
}

// compileTwice compiles, and once more in a new worker if the first one died: that may have been the machine's doing.
func (j *job) compileTwice(ctx context.Context, spec compilers.Job, phase func(string)) (compilers.Result, error) {
	result, err := j.c.compiler.Compile(ctx, spec, phase)
	j.spent(result.CPUSeconds)
	var exit *compilers.ExitError
	if !errors.As(err, &exit) || errors.Is(err, compilers.ErrStart) || ctx.Err() != nil || !j.Content.Stands() || j.died || j.c.leaving.Load() {
		return result, err
	}
	j.c.log.Warn("a worker died; its compile is tried once more", "model", j.Request.Name, "error", err)
	if j.died = true; spec.ModelFile != nil {
		return result, err // that is tried with a copy
	}
	if err := emptied(spec.Folder); err != nil {
		return result, err
	}
	spec.Written = nil // a load may have begun with what the first one wrote
	result, err = j.c.compiler.Compile(ctx, spec, phase)
	j.spent(result.CPUSeconds)
	return result, err
}

func emptied(folder string) error {
	entries, err := os.ReadDir(folder)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(folder, e.Name())))
	}
	return err
}

// checkTwice loads what was compiled, and once more if the process died, which may have been the machine's doing.
func (j *job) checkTwice(ctx context.Context, spec compilers.CheckJob) (compilers.CheckResult, error) {
	checked, err := j.c.compiler.Check(ctx, spec)
	j.spent(checked.CPUSeconds)
	if err != nil || checked.Outcome != compilers.Failed || checked.Code != trial.Crashed || ctx.Err() != nil || !j.Content.Stands() || j.c.leaving.Load() {
		return checked, err
	}
	checked, err = j.c.compiler.Check(ctx, spec)
	j.spent(checked.CPUSeconds)
	return checked, err
}

// failed settles what a job's failure is. It counts against the model only where the smallest model there is compiles and
// loads in the same kind of process; then it is remembered. What is said of a machine that lets nothing load is not.
func (j *job) failed(ctx context.Context, err error) error {
	c := j.c
	var e *apierr.Error
	switch {
	case ctx.Err() != nil:
		return err // whoever cancelled it tells
	case errors.Is(err, runtimes.ErrMoving):
		c.log.Info("a compile was ended, for the runtime's libraries changed", "model", j.Request.Name)
		return err // that is no failure: it is asked for again
	case !errors.As(err, &e) || failure.In(e) == nil:
		return j.tellFailed("", err)
	}
	j.plain(e)
	f := failure.In(e)
	if c.leaving.Load() && f.Reason == failure.WorkerDied { // systemd may end all processes of the service at once
		return apierr.New(apierr.Busy, err, "model %q: the daemon is stopping, and its compile was ended", j.Request.Name)
	}
	if f.Reason.OfModel() {
		broken, err2 := j.control(ctx)
		switch {
		case ctx.Err() != nil:
			return apierr.New(apierr.Cancelled, ctx.Err(), "model %q", j.Request.Name)
		case err2 != nil && runtimes.Unsettled(ctx, err2):
			return j.moved()
		case err2 != nil:
			c.log.Warn("whether anything compiles here could not be tried", "error", err2)
			return j.tellFailed(f.Reason, err) // then nothing is remembered either
		case broken != "":
			here := failure.OfMachine(f.Text+"; but the smallest model there is fails as well: "+broken).Refusal(err, "model %q cannot be compiled here", j.Request.Name)
			j.plain(here)
			return j.tellFailed(failure.Sandbox, here)
		}
	}
	f.RequestKey, f.BuildKey, f.ModelDigest = j.Plan.RequestKey, j.Plan.BuildKey, j.Plan.Canonical.Model
	f.UID, f.Scope, f.EP = j.Peer.UID, j.MemoryScope(j.scope), j.Plan.EPs[0].Name
	if f.Scope != "" {
		c.failures.Remember(j.Plan.FailureKey(j.Content, f.Scope), f, c.settings.Load().failures)
	}
	return j.tellFailed(f.Reason, err)
}

// control says why not even the smallest model compiles and loads here, "" if it does. The job has left the queue by now, so
// it waits for a turn as load checks do.
func (j *job) control(ctx context.Context) (string, error) {
	leave, err := j.c.checks.Take(ctx)
	if err != nil {
		return "", err
	}
	defer leave()
	return j.c.trials.Control(ctx, j.Plan.Against("", j.Content))
}

// tellFailed counts a failure and writes it into the history, unless whoever wanted the compile does that.
func (j *job) tellFailed(reason failure.Reason, err error) error {
	c := j.c
	if j.anew != "" || reason == failure.Cancelled { // whoever wanted it, or cancelled it, tells
		return err
	}
	c.index.Counters.Add("failures", 1)
	c.log.Info("compile failed", "model", j.Request.Name, "error", err)
	if c.failures.News(j.Plan.RequestKey, j.Peer.UID, reason) {
		c.happened(event.For(event.About{Peer: j.Peer, Key: j.Plan.RequestKey, Model: j.Request.Name},
			event.Failed, "%v", err))
	}
	return err
}

// succeeded forgets that the job's compile ever failed.
func (j *job) succeeded() {
	for _, scope := range []string{j.scope, j.MemoryScope(j.scope)} {
		j.c.failures.Forget(j.Plan.FailureKey(j.Content, scope))
	}
}

// saidOfFallback is what ONNX Runtime says of a session that may leave no node to the CPU, and would have to.
const saidOfFallback = "fallback to CPU EP has been explicitly disabled"

// aboutFallback adds to a failure that it was the request's own wish which the model cannot be compiled with.
func aboutFallback(f *failure.Failure, c *identity.Record) {
	if c.SessionOptions["session.disable_cpu_ep_fallback"] == "1" && strings.Contains(f.Text, saidOfFallback) {
		f.AddHint("without --complete (session.disable_cpu_ep_fallback) the rest is left to the CPU, and the answer says which nodes those are")
	}
}
