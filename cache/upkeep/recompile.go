package upkeep

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// Recompiler queues rebuilds of builds, and compiles them.
type Recompiler struct {
	*build.Builder
	Queue *Rebuilds
}

// rebuildRun compiles a build again.
type rebuildRun struct {
	*Recompiler

	// runtime is nil if the build's own libraries compile it, in their current version, or
	// otherwise the first runtime that has its execution providers.
	runtime *runtimes.Runtime
	asked   *request.Request // a request that the build answers; may be nil

	Rebuild // the rebuild under way
}

// RebuildRequest returns a request to compile a build again. A nil runtime means the build's own
// libraries. asked, which may be nil, is a request that the build answers, whose files may be the
// source; the caller closes them.
func (r *Recompiler) RebuildRequest(b *index.Build, rt *runtimes.Runtime, why string,
	asked *request.Request) RebuildRequest {
	t := rebuildRun{Recompiler: r, runtime: rt}
	w := RebuildRequest{Build: b, Why: why, Compile: t.compile, Asked: asked}
	if rt != nil {
		w.Runtime = rt.Name
	}
	return w
}

// Refresh queues a rebuild of a build for the runtime of that name, even if the current libraries
// made it. asked is as for RebuildRequest.
func (r *Recompiler) Refresh(b *index.Build, runtime, why string, asked *request.Request) {
	r.Log.Debug("rebuild needed", "build", b.BuildKey.String(), "runtime", runtime, "why", why)
	w := r.RebuildRequest(b, r.Planner.Runtimes.ByName(runtime, b), why, asked)
	w.Refresh = true
	r.Queue.Enqueue(w)
}

// RefreshIfStale queues a rebuild of a served build that is not optimal or is too old.
func (r *Recompiler) RefreshIfStale(at *request.Attempt, b *index.Build, j judge.Judgement) {
	if at.Plan.Outside || at.Adopting {
		return // the daemon cannot compile it
	}
	asked := at.Request
	if at.AsMember {
		asked = nil // it has only one of the group's models
	}
	const preferred = request.PolicyServeAndRefresh
	policy := r.Policy(at.Plan.EPs)
	switch {
	case j.Verdict == compilers.PreferRecompilation &&
		cmp.Or(policy.PreferRecompilation, preferred) == preferred:
		r.Refresh(b, j.Runtime, "recompiling is preferred: "+j.Reason, asked)
	case r.isTooOld(b, policy):
		r.Refresh(b, j.Runtime, fmt.Sprintf("older than %s", policy.MaxAge), asked)
	}
}

// compile compiles the build again and publishes it in its scope, unless that is no longer needed.
func (t rebuildRun) compile(ctx context.Context, what Rebuild,
	asked *request.Request) (out Outcome) {
	t.Rebuild, t.asked = what, asked
	builds, err := t.Store.Index().Lookup(t.RequestKey, t.Scope)
	if err != nil {
		return Outcome{Err: err}
	}
	if len(builds) == 0 {
		return Outcome{Err: NotNeeded("the builds of the request were removed")}
	}
	// The build itself may have been replaced, but all builds are of the same request.
	of := slices.IndexFunc(builds, func(b index.Build) bool { return b.ID == t.Build })
	b := &builds[max(0, of)]
	at, err := t.plan(ctx, b)
	if err == nil {
		if rt := t.runtime; rt != nil {
			tried := at.Content
			out.Same = func() bool {
				now := rt.LastContent()
				return now == nil || now.SameLibraries(tried)
			}
		}
		err = t.checkNeeded(builds, at.Plan)
	}
	again := build.Recompile{ID: t.ID, Why: t.Why, Replaces: b.ID}
	if err == nil {
		at, err = t.withModel(ctx, at, b, builds, &again)
	}
	if err == nil {
		defer at.Close()
		out.CPU, err = t.runOrJoin(ctx, b, at, again)
	}
	t.recordNotRebuilt(ctx, b, err)
	out.Err = err
	return out
}

// runOrJoin runs the compile, or joins a request's job for the same build. It returns the processor
// time of the workers.
func (t rebuildRun) runOrJoin(ctx context.Context, b *index.Build, at *request.Attempt,
	again build.Recompile) (
	time.Duration, error) {
	t.Store.RecordEvent(event.Of(b, event.Rebuild, "%s", t.Why))
	var own *build.Job
	key := jobs.Key{Build: at.Plan.BuildKey, Scope: b.Scope}
	result, _, err := t.Jobs.Join(ctx, key, jobs.Caller{Idle: true},
		func() (_ jobs.Work, err error) {
			own, err = t.NewJob(at, b.Scope, again)
			return own, err
		})
	var cpu time.Duration
	if own != nil {
		cpu = own.CPU()
	}
	if errors.Is(err, runtimes.ErrGivenUp) {
		return cpu, NotNeeded("cancelled")
	}
	if err == nil && result.Alone != nil {
		return cpu, NotNeeded("not stored: %s %v", result.Why, result.Build.Warnings)
	}
	return cpu, err
}

// plan plans the build's request for the runtime that it is compiled for.
func (t rebuildRun) plan(ctx context.Context, b *index.Build) (*request.Attempt, error) {
	at, err := workspace.AttemptOf(b)
	if err != nil {
		return nil, err
	}
	rc, err := t.libraries(ctx, b, at.Request)
	if err != nil {
		return nil, err
	}
	if at, err = t.Planner.WithPlan(ctx, at.WithRuntime("", rc)); err != nil {
		return nil, err
	}
	if now := at.Plan.RequestKey; now != b.RequestKey {
		return nil, fmt.Errorf("request %s has become %s", b.RequestKey, now)
	}
	return at, nil
}

// libraries returns the libraries to compile the build with.
func (t rebuildRun) libraries(ctx context.Context, b *index.Build, r *request.Request) (
	*runtimes.Content, error) {
	quiet := func(string) {}
	if t.runtime != nil && !t.Planner.Runtimes.IsCurrent(t.runtime) {
		return nil, NotNeeded("runtime %q is no longer registered", t.runtime.Name)
	}
	if t.runtime != nil {
		rc, err := t.Planner.Runtimes.Content(ctx, t.runtime, quiet)
		if err == nil && !rc.HasAll(r.EPs) {
			err = apierr.New(apierr.Unavailable, nil, "runtime %q no longer has all of %s",
				t.runtime.Name, request.EPNames(r.EPs))
		}
		return rc, err
	}
	for _, ep := range b.EPs {
		r.Runtime.EPLibraries = append(r.Runtime.EPLibraries,
			runtimes.LibraryRef{EP: ep.Name, Path: ep.Library})
	}
	if len(r.Runtime.EPLibraries) > 0 {
		if _, rc, err := t.Planner.Runtimes.Resolve(ctx, r.RuntimeWanted(), quiet); err == nil {
			return rc, nil
		}
	}
	any := r.RuntimeWanted()
	any.EPLibraries = nil
	_, rc, err := t.Planner.Runtimes.Resolve(ctx, any, quiet)
	return rc, err
}

// checkNeeded returns an ErrNotNeeded if a build exists that the compile would equal.
func (t rebuildRun) checkNeeded(builds []index.Build, p *request.Plan) error {
	for i := range builds {
		have := &builds[i]
		if !p.MadeExactly(have) || t.Store.Index().Journal.StateOf(have.ID).Name != index.Current {
			continue
		}
		if have.ID != t.Build || !t.Rebuild.Refresh ||
			t.Now().Sub(have.Created) < RefreshEvery && !t.isTooOld(have, t.Policy(p.EPs)) {
			return NotNeeded("build %s exists", have.ID)
		}
	}
	return nil
}

// RefreshEvery is how old a build of the current libraries has to be before it is compiled again on
// their recommendation, because some libraries recommend a recompile of each build, even of their
// own.
const RefreshEvery = 24 * time.Hour

// IsTooOld reports whether the attempt's build is older than the policy allows.
func (r *Recompiler) IsTooOld(at *request.Attempt, b *index.Build) bool {
	return r.isTooOld(b, r.Policy(at.Plan.EPs))
}

func (r *Recompiler) isTooOld(b *index.Build, p request.Policy) bool {
	return p.MaxAge > 0 && r.Now().Sub(b.Compiled()) > p.MaxAge
}

// DamageDelay is how long a rebuild of a damaged build waits, because the request that found the
// damage probably compiles it.
const DamageDelay = 5 * time.Second

// RebuildDamaged queues a rebuild of the build if it is damaged.
func (r *Recompiler) RebuildDamaged(b *index.Build) {
	if s := r.Store.Index().Journal.StateOf(b.ID); s.Name == index.Damaged {
		w := r.RebuildRequest(b, nil, "it was damaged: "+s.Reason, nil)
		w.Delay = DamageDelay
		r.Queue.Enqueue(w)
	}
}

// RebuildAllDamaged queues rebuilds of all builds that are recorded as damaged.
func (r *Recompiler) RebuildAllDamaged(ctx context.Context) error {
	for _, id := range r.Store.Index().Journal.NotServed() {
		b, err := r.Store.Index().Get(id)
		if errors.Is(err, index.ErrNotFound) {
			continue // removed in the meantime
		}
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return err
		}
		r.RebuildDamaged(&b)
	}
	return nil
}

// withModel returns the attempt with the model open, and sets its source in again: the files of the
// request asked, otherwise the source recorded in one of the request's builds, in b first.
func (t rebuildRun) withModel(ctx context.Context, at *request.Attempt, b *index.Build,
	builds []index.Build, again *build.Recompile) (*request.Attempt, error) {
	if t.asked != nil {
		if r, err := t.Kept.RequestWith(ctx, t.asked, b); err == nil {
			again.Foreign = t.asked.Peer.UID != r.Peer.UID
			return at.WithRequest(r), nil
		} else if ctx.Err() != nil {
			return nil, err
		}
	}
	from := b
	r, first := t.Kept.Request(ctx, from)
	err := first
	for i := range builds {
		if err == nil {
			break
		}
		if builds[i].ID != b.ID && builds[i].Source.Kind != "" && ctx.Err() == nil {
			from = &builds[i]
			r, err = t.Kept.Request(ctx, from)
		}
	}
	if err != nil {
		return nil, first
	}
	again.Sources = workspace.SourcesOf(from)
	return at.WithRequest(r), nil
}

// recordNotRebuilt writes into the history why a build was not compiled again. It omits builds
// whose source was never kept, because there may be thousands of them.
func (t rebuildRun) recordNotRebuilt(ctx context.Context, b *index.Build, err error) {
	if err == nil || ctx.Err() != nil || errors.Is(err, ErrNotNeeded) ||
		errors.Is(err, workspace.ErrNoSource) && b.Source.Kind == "" {
		return
	}
	if !errors.Is(err, workspace.ErrNoSource) {
		t.Store.Index().Counters.Add("failures", 1)
	}
	t.Log.Info("not recompiled", "model", b.ModelName, "build", b.BuildKey.String(), "why", err)
	t.Store.RecordEvent(event.Of(b, event.NotRebuilt, "%v", err))
}
