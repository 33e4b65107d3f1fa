// Package build makes builds: from a plan, through a worker's compile in a private directory, to
// files that are checked, loaded once and published; and converts builds between embedded and
// sidecar.
package build

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/loadcheck"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/store"
)

// Settings are the part of the configuration that may change while a Builder works.
type Settings struct {
	KeepSource string          // how source models are kept: KeepReference, KeepCopy or KeepNone
	Failures   failure.Options // how long failures are remembered
}

// Options are the parts and limits that a Builder works with.
type Options struct {
	Store       *store.Store
	Jobs        *jobs.Jobs
	Compiler    compilers.Compiler
	Kept        *workspace.Sources
	Workspaces  *workspace.Maker
	Planner     *plan.Planner
	Lookup      *lookup.Lookup
	LoadChecker *loadcheck.Checker
	Failures    *failure.Remembered
	Rights      *rights.Rights
	MaxGraph    int64 // bytes of a graph with an embedded context
	Log         *slog.Logger
	Now         func() time.Time

	Settings func() Settings
	Policy   func([]compilers.EP) request.Policy
	// Owner returns the host's user that owns a container's user.
	Owner func(uid uint32) uint32
	// RunLater runs a function in the background; the daemon waits for it when it ends.
	RunLater func(func(context.Context))
	// MayPut returns an error if files of these sizes exceed the user's quota for builds that
	// applications put.
	MayPut func(ctx context.Context, owner uint32, model string, sizes []int64) (int64, error)
	// Begin is called before a job of a request compiles for all users. It returns a build that was
	// fetched from another machine, otherwise a function, or nil, that the job calls at its end.
	Begin func(context.Context, *request.Attempt, *jobs.Job) (b *index.Build, end func(stored bool))
	// OnStored is called when a job has stored its build. The job's files are open until then.
	OnStored func(at *request.Attempt, b *index.Build, ended <-chan struct{})
}

// Builder makes builds: it compiles models in jobs, and converts builds between embedded and
// sidecar.
type Builder struct {
	Options

	conversions keyed.Group[*jobs.Result] // by build key, scope and source build
	closing     atomic.Bool
}

// New returns a Builder.
func New(o Options) *Builder { return &Builder{Options: o} }

// PrepareClose announces that the daemon is about to end. From then on a worker that dies is not
// replaced, and its death is not recorded as a failure of the model.
func (bd *Builder) PrepareClose() { bd.closing.Store(true) }

// Compile compiles the model, or waits for a job that does, and answers with a lease on the result.
func (bd *Builder) Compile(ctx context.Context, at *request.Attempt, why string) (
	*request.Answer, error) {
	var result *jobs.Result
	var first bool
	var err error
	for range request.MaxHandOvers {
		key := at.JobKey()
		own := jobs.Key{Build: key.Build, Scope: rights.OwnScope(at.Peer)}
		if at.OnMiss == request.Wait && key.Scope != "" && bd.Jobs.Joinable(own) != nil {
			key = own // an application of the same user holds the claim
		}
		result, first, err = bd.Jobs.Join(ctx, key, at.Caller(bd.Owner),
			bd.prepareJob(at, key.Scope))
		if err == nil && !first && at.RefusesORT(result.Build) {
			bd.Store.TakerDone(result.Build.ID) // not taken, so that the collector may remove it
			err = request.OtherORTError(at, result.Build)
			continue
		}
		end, is := errors.AsType[*request.ClaimEnd](err)
		if !is {
			break // not found: the claim is over, so the model is compiled here
		}
		why = end.Error()
	}
	if err != nil {
		return nil, request.JobError(ctx, at.Name, err)
	}
	if !first && result.Build.Put && !result.Fetched {
		return bd.AnswerWaiter(ctx, at, result)
	}
	defer bd.Store.TakerDone(result.Build.ID)
	if result.Fetched {
		return nil, store.ErrRemoved // the request begins again, and judges it
	}
	a, err := bd.serveCompiled(ctx, result, at.Phase)
	if errors.Is(err, store.ErrRemoved) {
		*at.SkipServing = append(*at.SkipServing, result.Build.ID)
	}
	if err != nil {
		return nil, request.UnservableError(err, at.Name, "compiled")
	}
	a.Outcome, a.Why = request.Waited, "compiled by another request for the same build"
	if first && !result.Found {
		a.Outcome, a.Why = request.Compiled, why
		a.Compared, _ = result.Fact.(*compilers.VerifyResult) // nil if it was not compared
	}
	if result.Why != "" {
		a.Why = result.Why
	}
	return a, nil
}

func (bd *Builder) serveCompiled(ctx context.Context, result *jobs.Result, phase func(string)) (
	*request.Answer, error) {
	if result.Alone == nil {
		return lookup.Lease(ctx, bd.Store, result.Build, phase)
	}
	a, err := lookup.Leased(result.Build, result.Alone)
	if err == nil {
		a.Unkept = true
	}
	return a, err
}

// WorkIfMade looks again for the build that a job in this scope would make, and returns work that
// returns it, or nil if the build is still to be made. A job can be joined until its build is
// stored, so a caller that holds the lock of Jobs either joins the job or finds its build here.
func (bd *Builder) WorkIfMade(at *request.Attempt, scope string) jobs.Work {
	if at.OnMiss == request.Refresh || at.OnMiss == request.Bypass || scope == "" {
		return nil
	}
	for b, err := range bd.Lookup.StoredBuilds(at.Plan, []string{scope}) {
		if err != nil {
			return nil // the job fails with it
		}
		if at.Plan.MadeExactly(b) && !slices.Contains(*at.SkipServing, b.ID) &&
			bd.Lookup.WhyWithheld(at, b) == "" {
			return jobs.Func{Work: at.JobAbout(scope, "requested"),
				Do: func(context.Context, *jobs.Job) (*jobs.Result, error) {
					return &jobs.Result{Build: b, Found: true}, nil
				}}
		}
	}
	return nil
}

// AnswerWaiter answers with the result of a job that another request or an application began.
func (bd *Builder) AnswerWaiter(ctx context.Context, at *request.Attempt, result *jobs.Result) (
	*request.Answer, error) {
	defer bd.Store.TakerDone(result.Build.ID)
	if result.Build.Put && !at.Plan.Outside && at.Plan.Marks.OtherMachine(result.Build) {
		// The request begins again, because it has the model that judging the build needs.
		return nil, store.ErrRemoved
	}
	a, err := bd.serveCompiled(ctx, result, at.Phase)
	if err != nil {
		return nil, request.UnservableError(err, at.Name, "compiled")
	}
	a.Outcome, a.Why = request.Waited, "compiled by another request for the same build"
	a.Compatibility = judge.Judgement{Verdict: compilers.Optimal, Source: judge.SourceLibrary,
		Reason: "compiled for this request", At: bd.Now()}
	if result.Build.Put {
		a.Why = request.PutBy(result.Build)
		a.Compatibility.Source, a.Compatibility.Reason = judge.SourcePut, a.Why
	}
	a.Compatibility = a.Compatibility.Doubted(result.Build)
	return a, nil
}

// CompileLater starts a job that compiles the model, and answers at once with the job.
func (bd *Builder) CompileLater(ctx context.Context, at *request.Attempt, why string) (
	*request.Answer, error) {
	key := at.JobKey()
	if key.Scope == "" {
		return nil, apierr.New(apierr.BadRequest, nil, "model %q: the request says to store "+
			"nothing, so a compile in the background would be lost", at.Name).
			WithHint("request it with on_miss wait")
	}
	f, first, err := bd.Jobs.Start(key, at.WithoutProgress().Caller(bd.Owner),
		bd.prepareJob(at, key.Scope))
	if err != nil {
		return nil, request.JobError(ctx, at.Name, err)
	}
	if !first {
		why = "it is being compiled already"
		if err := bd.addFollowUp(f, key, at); err != nil {
			return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
		}
	}
	a := at.Answer(request.Later)
	a.Job, a.Why = f.ID, why
	return a, nil
}

// addFollowUp has the model compiled after the job f if the result of f does not suit the request.
// That happens if f waits for an application that puts nothing, or if the request is strict about
// ONNX Runtime and f uses another version. One request of each user is kept until then.
func (bd *Builder) addFollowUp(f *jobs.Job, key jobs.Key, at *request.Attempt) error {
	user := jobs.FollowUp{UID: at.Peer.UID, Strict: at.StrictORT}
	if !f.Description().Claim && !at.StrictORT || !f.AddFollowUp(user, len(at.Descriptors())) {
		return nil
	}
	files, err := at.WithOwnFiles()
	if err != nil {
		return err
	}
	own := at.WithRequest(files).WithoutProgress()
	bd.RunLater(func(ctx context.Context) {
		defer files.Close()
		select {
		case <-f.Done():
		case <-ctx.Done():
			return
		}
		result, err := f.Outcome()
		if !errors.As(err, new(*request.ClaimEnd)) &&
			(err != nil || !own.NeedsOtherORT(result.Build.ORTVersion)) {
			return
		}
		_, _, err = bd.Jobs.Start(key, own.Caller(bd.Owner), bd.prepareJob(own, key.Scope))
		if err != nil && ctx.Err() == nil { // otherwise the daemon is ending, which is no failure
			bd.Log.Info("no compile after a claim that ended without a result",
				"model", own.Name, "error", err)
			about := event.About{Peer: own.Peer, Key: f.Description().RequestKey, Model: own.Name}
			bd.Store.RecordEvent(event.For(about, event.Failed, "%v", err))
		}
	})
	return nil
}
