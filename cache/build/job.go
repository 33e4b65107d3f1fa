package build

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
)

// Job is one compile in a worker. It has duplicates of the request's descriptors, because the
// caller may disconnect before the job ends.
type Job struct {
	bd *Builder
	*request.Attempt
	*workspace.Workspace
	scope     string // "" to keep nothing
	recompile Recompile

	running *jobs.Job
	urgent  <-chan struct{} // closed as soon as a request waits for this job
	// leaveSlot lets other jobs compile while the rest of this one runs.
	leaveSlot func()
	// compiling the original in place failed, so the model is copied
	modelCopied    bool
	outerExposed   bool               // the copies are those of ExposeOuter
	workerDied     bool               // a worker died, and its compile is retried
	cpu            atomic.Int64       // processor time of the workers in nanoseconds
	memory         int64              // peak memory of its workers in bytes; 0: not measured
	reservation    *store.Reservation // for the result; nil: it is not stored
	outputEstimate int64              // expected bytes of the result; 0: unknown

	compared *compilers.VerifyResult // outputs compared with the source model's; nil: not compared

	keptSources map[string]index.File // copies of models that are stored so far, by path
}

// Recompile says why a job compiles a build again, and from which sources. It is zero for a
// request.
type Recompile struct {
	ID       string         // the job's id from before a restart; "": a new one
	Why      string         // reason of a background rebuild
	Replaces index.BuildID  // the build that the new one replaces
	Sources  []index.Source // where its models are; none: in the request
	Foreign  bool           // the models came from another user than the build's
}

// NewJob returns a job that compiles the attempt's model for the scope; with scope "" the result is
// not stored. The job duplicates the descriptors, and closes them at its end.
func (bd *Builder) NewJob(at *request.Attempt, scope string, why Recompile) (*Job, error) {
	own, err := at.WithOwnFiles()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
	}
	at = at.WithRequest(own)
	return &Job{bd: bd, recompile: why, Attempt: at, scope: scope,
		Workspace: workspace.New(own, &at.Plan.Canonical, at.Plan.ShortKey())}, nil
}

// Run compiles the model and stores the build.
func (j *Job) Run(ctx context.Context, f *jobs.Job) (result *jobs.Result, err error) {
	defer j.Request.Close()
	j.running = f
	if j.bd.Begin != nil && j.recompile.Why == "" && j.scope == rights.Shared &&
		j.OnMiss != request.Refresh {
		b, end := j.bd.Begin(ctx, j.Attempt, f)
		if b != nil {
			return &jobs.Result{Build: b, Fetched: true}, nil
		}
		defer func() { end(err == nil && result.Alone == nil) }()
	}
	result, err = j.runInQueue(ctx, f)
	for errors.Is(err, jobs.ErrYielded) {
		result, err = j.runInQueue(ctx, f)
	}
	if err != nil {
		return nil, j.failed(ctx, err)
	}
	for _, scope := range []string{j.scope, j.FailureScope(j.scope)} {
		j.bd.Failures.Forget(j.Plan.FailureKey(j.Content, scope))
	}
	if j.compared != nil {
		result.Fact = j.compared
	}
	if !isOpen(j.urgent) && result.Alone == nil {
		// Makes the view once for all waiting requests. The error is ignored because each of them
		// gets it again.
		_, _ = lookup.View(ctx, j.bd.Store, result.Build, f.SetPhase)
	}
	j.bd.Store.Index().Counters.Add("compiles", 1)
	return result, nil
}

// runInQueue waits for a slot and compiles. It fails with jobs.ErrYielded if the job has to wait
// again because more urgent work needs the slot.
func (j *Job) runInQueue(ctx context.Context, f *jobs.Job) (*jobs.Result, error) {
	p, err := f.AcquireSlot(ctx)
	if err != nil {
		return nil, apierr.New(apierr.Cancelled, err, "model %q", j.Request.Name)
	}
	defer p.End()
	j.reserveEstimate(ctx, f.Description())
	defer func() { j.reservation.Release() }()
	j.urgent, j.leaveSlot = p.Idle, p.Leave
	began := j.bd.Now()
	result, err := j.compileStaged(p.Context, f.SetPhase)
	switch {
	case err == nil:
		took := j.bd.Now().Sub(began)
		j.bd.Jobs.Costs.Learn(f.Description().Kind(), took, j.memory, j.outputEstimate,
			isOpen(p.Idle))
	case ctx.Err() == nil && context.Cause(p.Context) == jobs.ErrYielded:
		return nil, jobs.ErrYielded
	}
	return result, err
}

// isOpen reports whether the channel is still open.
func isOpen(urgent <-chan struct{}) bool {
	select {
	case <-urgent:
		return false
	default:
		return true
	}
}

// compileStaged compiles the model in place if possible, otherwise a private copy of it.
func (j *Job) compileStaged(ctx context.Context, phase func(string)) (*jobs.Result, error) {
	result, err := j.compileStagedOnce(ctx, phase)
	if errors.Is(err, workspace.ErrOriginalUnusable) && ctx.Err() == nil {
		j.bd.Log.Info("a compile is retried with a private copy of its model",
			"model", j.Request.Name, "why", err)
		j.modelCopied = true
		result, err = j.compileStagedOnce(ctx, phase)
	}
	if err != nil && ctx.Err() == nil && j.outerMayBeLost(ctx, err) {
		j.bd.Log.Info("a compile is retried with all that bodies of nodes read as outputs",
			"model", j.Request.Name, "why", err)
		j.modelCopied, j.outerExposed = true, true
		result, err = j.compileStagedOnce(ctx, phase)
	}
	return result, err
}

// compileStagedOnce compiles in a directory of its own, and removes it.
func (j *Job) compileStagedOnce(ctx context.Context, phase func(string)) (*jobs.Result, error) {
	dir, remove, err := j.bd.Store.Stage("job-")
	defer remove()
	j.Dir = dir
	for _, dir := range []string{filepath.Join(j.Dir, outDir), j.ModelDir()} {
		if err == nil {
			err = os.Mkdir(dir, 0o700)
		}
	}
	if err != nil {
		return nil, request.StoreError(err, j.Request.Name)
	}
	return j.compile(ctx, phase)
}

// outDir is the directory with the worker's output, in the staging directory of a job.
const outDir = "out"

func (j *Job) Description() jobs.Description {
	files := j.Descriptors()
	a := j.JobAbout(j.scope, "requested")
	a.ID, a.Replaces, a.Files = j.recompile.ID, j.recompile.Replaces, len(files)
	if j.recompile.Why != "" {
		a.Why = j.recompile.Why
	}
	if n := j.Request.Models(); n > 1 {
		a.Models = n
	}
	for _, f := range files {
		if info, err := f.Stat(); err == nil { // otherwise copying it fails later
			a.Size += info.Size()
		}
	}
	return a
}

// CPU returns the processor time of the job's workers so far.
func (j *Job) CPU() time.Duration { return time.Duration(j.cpu.Load()) }

func (j *Job) addCPU(seconds float64) {
	j.cpu.Add(int64(seconds * float64(time.Second)))
}

// compile makes the artefact in the staging directory and publishes it.
func (j *Job) compile(ctx context.Context, phase func(string)) (*jobs.Result, error) {
	phase("reading")
	out := filepath.Join(j.Dir, outDir)
	spec := compilers.Job{
		Runtime: j.Content.Spec, EPs: j.Plan.EPs,
		Model: j.ModelPath(0), Dir: out, Output: j.MemberOutput(0), Embed: j.Embed,
		Session: j.Session, Route: j.Plan.Canonical.Route,
		Initializers: j.Plan.Canonical.Output.Initializers(), Pace: compilers.Pace{Idle: j.urgent},
	}
	spec.GraphOptimizationLevel = j.Plan.Canonical.GraphOptimizationLevel
	o := j.modelInPlace(ctx, spec)
	defer o.Close()
	if o != nil {
		spec.ModelFile = o.File
	} else if err := workspace.CheckSpace(j.Dir, j.AllFiles()); err != nil {
		return nil, request.StoreError(err, j.Request.Name)
	}
	workers := j.startEarlyWorkers(ctx, spec, o)
	defer workers.end() // before the directory is removed
	proven, err := j.provideModel(ctx, o, workers)
	if err != nil {
		return nil, err
	}
	defer proven() // before the directory is removed, too
	if j.outerExposed {
		err := proven() // of the copies as they are now
		if err == nil {
			err = j.ExposeOuter(ctx)
		}
		if err != nil {
			return nil, err
		}
	}
	phase("compiling")
	for i := 1; i < len(j.Copies); i++ {
		spec.Share = append(spec.Share,
			compilers.ShareMember{Model: j.Copies[i].Path, Output: j.MemberOutput(i)})
	}
	result, err := workers.compile(ctx, spec)
	j.memory = result.MaxRSS
	if err := j.RestoreCopies(); err != nil {
		return nil, err
	}
	if ctx.Err() == nil && !j.Content.IsCurrent() {
		return nil, j.librariesReplaced()
	}
	if err := proven(); err != nil {
		return nil, err
	}
	if err != nil && ctx.Err() == nil && !j.bd.closing.Load() && o.MayHaveCaused(err, spec.Model) {
		return nil, fmt.Errorf("%w: %w", workspace.ErrOriginalUnusable, err)
	}
	if err != nil {
		return nil, cmp.Or(j.fullDisk(out, err), j.withAdvice(
			request.CompileError(err, result.Log, "model %q does not compile", j.replaceName(err))))
	}
	phase("checking")
	if err := j.restoreInterface(ctx, out, &result); err != nil {
		return nil, cmp.Or(j.fullDisk(out, err), err)
	}
	hashed := j.hashAhead(ctx, out, result.Files)
	defer hashed()
	b, err := j.check(ctx, out, result, workers)
	if ctx.Err() == nil && !j.Content.IsCurrent() {
		return nil, j.librariesReplaced()
	}
	if err != nil {
		return nil, cmp.Or(j.fullDisk(out, err), err)
	}
	phase("storing")
	if j.scope == "" {
		return j.bd.createUnkeptView(b, out)
	}
	return j.store(ctx, b, out, hashed())
}

// fullDisk returns the refusal of a compile that failed on a disk without space for an artefact of
// the model's size, otherwise nil. It looks at the free space because not all EPs report a full
// disk, and because a full disk must not be remembered as the model's failure.
func (j *Job) fullDisk(out string, err error) error {
	free, unknown := cas.FreeBytes(out)
	if unknown != nil || workspace.CheckSpace(out, j.AllFiles()) == nil {
		return nil
	}
	return apierr.New(apierr.NoSpace, err, "model %q does not compile; only %s are free in %q",
		j.Request.Name, bytesize.Text(free), j.bd.Store.Directory())
}

// provideModel copies the model, or hashes the original, for the worker. The returned function
// waits until the worker is known to have read the bytes that the key was made from. For an
// original it must be called after the compile. If it fails, the output must not be used.
func (j *Job) provideModel(ctx context.Context, o *workspace.Original, workers *earlyWorkers) (
	proven func() error, err error) {
	if o != nil {
		return o.Verify, nil
	}
	proof, err := j.CopyModel(ctx)
	if err != nil {
		return nil, err
	}
	return startAsync(func() error {
		err := proof(ctx)
		if err != nil {
			workers.cancel()
		}
		return err
	}), nil
}

// startAsync runs do in a goroutine, and returns a function that waits for its result.
func startAsync[T any](do func() T) (wait func() T) {
	wait = sync.OnceValue(do)
	go wait()
	return wait
}

// minHashAhead is the smallest file, in bytes, that is hashed ahead.
const minHashAhead = 1 << 20

// hashAhead hashes large files of the output while the output is checked. hashed waits for the
// results.
func (j *Job) hashAhead(ctx context.Context, out string, files []string) (
	hashed func() map[string]cas.Hashed) {
	if j.scope == "" {
		return func() map[string]cas.Hashed { return nil }
	}
	return startAsync(func() map[string]cas.Hashed {
		found := make(map[string]cas.Hashed)
		for _, name := range files {
			path := filepath.Join(out, filepath.FromSlash(name))
			if info, err := os.Lstat(path); err != nil || info.Size() < minHashAhead {
				continue // CheckOutput reports the error
			}
			if h, err := j.bd.Store.Blobs().HashAhead(ctx, path); err == nil {
				found[name] = h // on an error it is hashed when it is stored
			}
		}
		return found
	})
}

// librariesReplaced returns the error of a compile during which the runtime's libraries changed.
// Its result, or its crash, may come from a mixture of both versions, so it belongs to no build
// key.
func (j *Job) librariesReplaced() error {
	return apierr.New(apierr.Busy, runtimes.ErrFilesChanging,
		"model %q: the runtime's libraries changed during the compile", j.Request.Name).
		WithHint("ask again")
}

func (j *Job) replaceName(err error) string {
	if e, is := errors.AsType[*compilers.MemberError](err); is && e.Member >= 0 &&
		e.Member < j.Request.Models() {
		return j.Request.ModelFiles(e.Member).Name
	}
	return j.Request.Name
}

// modelInPlace opens the job's model in place, without a copy. It returns nil if a private copy is
// needed: no stamp shows that the file is unchanged, the compiler needs a copy, or the model has
// several files (execution providers refuse files that do not lie in one directory).
func (j *Job) modelInPlace(ctx context.Context, spec compilers.Job) *workspace.Original {
	opener, ok := j.bd.Compiler.(compilers.OpenModelCompiler)
	if !ok || j.modelCopied || j.Request.Models() > 1 || j.VerifyOutput != 0 {
		return nil
	}
	stamp, ok := j.bd.Kept.Models.StampIfKnown(j.Peer.UID, j.Request.ModelFiles(0),
		j.Plan.Canonical.Model)
	if !ok {
		return nil
	}
	file, err := workspace.Reopen(j.Graph)
	if err != nil {
		return nil // the worker may not open it by path; the user sent a descriptor
	}
	o := &workspace.Original{File: file, Stamp: stamp}
	spec.ModelFile = o.File
	m, err := identity.Files{Name: j.Request.Name, Graph: file}.Read(ctx)
	if err != nil || len(m.Locations()) > 0 || !opener.AcceptsOpenModel(spec) {
		o.Close()
		return nil // copying the model reports the error
	}
	j.UseOriginal(spec.Model, o, m)
	return o
}
