package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/sources"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// rebuild compiles a build again.
type rebuild struct {
	c *Cache

	// runtime is nil for a build whose own libraries compile it, as they are by then, or else the first
	// runtime that has its execution providers.
	runtime *runtimes.Runtime
	asked   *request.Request // a request that the build answers; nil: there is none

	upkeep.Task // while it is compiled
}

// wish asks for a build to be compiled again.
func (t rebuild) wish(b *index.Build, why string) upkeep.Wish {
	w := upkeep.Wish{Build: b, Why: why, Compile: t.compile}
	if t.runtime != nil {
		w.Runtime = t.runtime.Name
	}
	return w
}

// files lets the rebuild use those of a request, which stay the caller's to close. r may be nil.
func (t rebuild) files(r *request.Request) *upkeep.Files {
	if r == nil {
		return nil
	}
	return &upkeep.Files{Count: len(r.Descriptors()), Hold: func() (upkeep.Compile, func(), error) {
		own, err := r.Own()
		if err != nil {
			return nil, nil, err
		}
		t.asked = own
		return t.compile, own.Close, nil
	}}
}

// compile compiles the build of the task, unless that is settled already, and publishes it in the
// build's scope.
func (t rebuild) compile(ctx context.Context, task upkeep.Task) (out upkeep.Outcome) {
	c := t.c
	t.Task = task
	builds, err := c.index.Lookup(t.RequestKey, t.Scope)
	if err != nil {
		return upkeep.Outcome{Err: err}
	}
	if len(builds) == 0 {
		return upkeep.Outcome{Err: upkeep.Settled("the builds of the request are gone")}
	}
	// The build that was wished for may have been compiled meanwhile, but its request is that of all of them.
	b := &builds[max(0, slices.IndexFunc(builds, func(b index.Build) bool { return b.ID == t.Build }))]
	at, err := t.plan(ctx, b)
	if err == nil {
		if rt := t.runtime; rt != nil {
			out.Same = func() bool {
				now := rt.Found()
				return now == nil || now.Same(at.Content)
			}
		}
		err = t.needed(builds, at.Plan)
	}
	var m *kept
	if err == nil {
		m, err = t.modelFor(ctx, b, builds)
	}
	if err == nil {
		defer m.request.Close()
		out.CPU, err = t.fly(ctx, b, m, at.WithRequest(m.request))
	}
	c.tellUnmade(ctx, b, err)
	out.Err = err
	return out
}

// fly runs the compile, or waits for that of a request for the same. It returns the processor time
// that the workers took.
func (t rebuild) fly(ctx context.Context, b *index.Build, m *kept, at *request.Attempt) (time.Duration, error) {
	c := t.c
	c.happened(event.Of(b, event.Rebuild, "%s", t.Why))
	var own *job
	key := jobs.Key{Build: at.Plan.BuildKey, Scope: b.Scope}
	result, _, err := c.jobs.Join(ctx, key, jobs.Caller{Idle: true}, func() (jobs.Work, error) {
		j, err := c.newJob(at, b.Scope)
		if err != nil {
			return nil, err
		}
		own = j
		j.id, j.anew, j.sources, j.replaces, j.foreign = t.ID, t.Why, m.sources, b.ID, m.foreign
		return j, nil
	})
	var cpu time.Duration
	if own != nil {
		cpu = time.Duration(own.cpu.Load())
	}
	if errors.Is(err, runtimes.ErrGivenUp) {
		return cpu, upkeep.Settled("cancelled")
	}
	if err == nil && result.Alone != nil {
		return cpu, upkeep.Settled("not kept: %s %v", result.Why, result.Build.Warnings)
	}
	return cpu, err
}

// plan plans the build's request for the runtime that it is compiled for.
func (t rebuild) plan(ctx context.Context, b *index.Build) (*request.Attempt, error) {
	at, err := sources.AttemptOf(b)
	if err != nil {
		return nil, err
	}
	rc, err := t.libraries(ctx, b, at.Request)
	if err != nil {
		return nil, err
	}
	if at, err = t.c.planner.Planned(ctx, at.WithRuntime("", rc)); err != nil {
		return nil, err
	}
	if now := at.Plan.RequestKey; now != b.RequestKey {
		return nil, fmt.Errorf("request %s means another one now, %s", b.RequestKey, now)
	}
	return at, nil
}

func (t rebuild) libraries(ctx context.Context, b *index.Build, r *request.Request) (*runtimes.Content, error) {
	c := t.c
	quiet := func(string) {}
	if t.runtime != nil && !c.runtimes.Has(t.runtime) {
		return nil, upkeep.Settled("runtime %q is not registered any more", t.runtime.Name)
	}
	if t.runtime != nil {
		rc, err := c.runtimes.Content(ctx, t.runtime, quiet)
		if err == nil && !rc.HasAll(r.EPs) {
			err = apierr.New(apierr.Unavailable, nil, "runtime %q has not all of %s any more", t.runtime.Name, request.EPNames(r.EPs))
		}
		return rc, err
	}
	for _, ep := range b.EPs {
		r.Runtime.EPLibraries = append(r.Runtime.EPLibraries, runtimes.LibraryRef{EP: ep.Name, Path: ep.Library})
	}
	if len(r.Runtime.EPLibraries) > 0 {
		if _, rc, err := c.runtimes.Resolve(ctx, r.Wanted(), quiet); err == nil {
			return rc, nil
		}
	}
	any := r.Wanted()
	any.EPLibraries = nil
	_, rc, err := c.runtimes.Resolve(ctx, any, quiet)
	return rc, err
}

// needed says that it is settled if there is a build already that is what would be made.
func (t rebuild) needed(builds []index.Build, p *request.Plan) error {
	c := t.c
	for i := range builds {
		have := &builds[i]
		if !p.MadeExactly(have) || c.index.Journal.StateOf(have.ID).Name != index.Current {
			continue
		}
		if have.ID != t.Build || !t.Refresh || c.now().Sub(have.Created) < refreshEvery && !c.tooOld(have) {
			return upkeep.Settled("build %s is there", have.ID)
		}
	}
	return nil
}

// refreshEvery is how old a build of the very libraries has to be before it is made anew for their sake: some say of
// each build of their own that they would rather have another.
const refreshEvery = 24 * time.Hour

// tooOld tells whether the build is older than the policy for its execution providers likes it.
func (c *Cache) tooOld(b *index.Build) bool {
	for _, ep := range b.EPs {
		if age := c.settings.Load().policy(ep.Name).MaxAge; age > 0 && c.now().Sub(b.Compiled()) > age {
			return true
		}
	}
	return false
}

// healDelay is for whoever met the damage: that request compiles for itself.
const healDelay = 5 * time.Second

// heal wants a build anew that is damaged.
func (c *Cache) heal(b *index.Build) {
	if s := c.index.Journal.StateOf(b.ID); s.Name == index.Damaged {
		w := rebuild{c: c}.wish(b, "it was damaged: "+s.Reason)
		w.Delay = healDelay
		c.rebuilds.Want(w)
	}
}

// healAll wants what an earlier run found damaged.
func (c *Cache) healAll(ctx context.Context) error {
	for _, id := range c.index.Journal.NotServed() {
		b, err := c.index.Get(id)
		if errors.Is(err, index.ErrNotFound) {
			continue // it has just gone
		}
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return err
		}
		c.heal(&b)
	}
	return nil
}

// kept is a request with the model that was kept for it.
type kept struct {
	request *request.Request
	sources []index.Source // where its models are from; none: from a request
	foreign bool           // the files came from another user than the build's
}

// modelFor opens the model: the files of the request that asked, or else a source that one of the request's builds
// has, its own first.
func (t rebuild) modelFor(ctx context.Context, b *index.Build, builds []index.Build) (*kept, error) {
	c := t.c
	if t.asked != nil {
		if r, err := c.askedWith(ctx, t.asked, b); err == nil {
			return &kept{request: r, foreign: t.asked.Peer.UID != r.Peer.UID}, nil
		} else if ctx.Err() != nil {
			return nil, err
		}
	}
	r, first := c.kept.Request(ctx, b)
	if first == nil {
		return &kept{request: r, sources: sources.Of(b)}, nil
	}
	for i := range builds {
		if builds[i].ID == b.ID || builds[i].Source.Kind == "" || ctx.Err() != nil {
			continue
		}
		if r, err := c.kept.Request(ctx, &builds[i]); err == nil {
			return &kept{request: r, sources: sources.Of(&builds[i])}, nil
		}
	}
	return nil, first
}

// askedWith gives the build's request with the files of another that means the same, if they are what they were then.
func (c *Cache) askedWith(ctx context.Context, asked *request.Request, b *index.Build) (*request.Request, error) {
	at, err := sources.AttemptOf(b)
	if err != nil {
		return nil, err
	}
	r := at.Request
	files, err := asked.Own()
	if err != nil {
		return nil, err
	}
	r.Graph, r.External, r.Group = files.Graph, files.External, files.Group
	return r, c.kept.Same(ctx, r, at.Identity)
}

// tellUnmade writes into the history why a build was not made anew, where that is not how things are anyway: a source
// that was never kept is not worth a line for each of thousands.
func (c *Cache) tellUnmade(ctx context.Context, b *index.Build, err error) {
	if err == nil || ctx.Err() != nil || errors.Is(err, upkeep.ErrSettled) || errors.Is(err, sources.ErrNoSource) && b.Source.Kind == "" {
		return
	}
	if !errors.Is(err, sources.ErrNoSource) {
		c.index.Counters.Add("failures", 1)
	}
	c.log.Info("not compiled anew", "model", b.ModelName, "build", b.BuildKey.String(), "why", err)
	c.happened(event.Of(b, event.NotRebuilt, "%v", err))
}

// wantAnew has a build compiled anew in the background, for the runtime of that name. A request that it answers, nil if
// there is none, may bring the model.
func (c *Cache) wantAnew(b *index.Build, runtime, why string, r *request.Request) {
	c.log.Debug("wanted anew", "build", b.BuildKey.String(), "runtime", runtime, "why", why)
	t := rebuild{c: c, runtime: c.runtimes.Named(runtime, b)}
	w := t.wish(b, why)
	w.Refresh, w.Files = true, t.files(r)
	c.rebuilds.Want(w)
}

// freshen wants a build compiled again that is served and is not the best there could be.
func (c *Cache) freshen(at *request.Attempt, b *index.Build, j judge.Judgement) {
	if at.Plan.Outside || at.Adopting {
		return // with libraries that are not run here, or from an artefact
	}
	r := at.Request
	if at.AsMember {
		r = nil // it brings one of the group's models
	}
	policy := c.policyOf(at.Plan.EPs)
	switch {
	case j.Verdict == compilers.PreferRecompilation && cmp.Or(policy.PreferRecompilation, request.PolicyServeAndRefresh) == request.PolicyServeAndRefresh:
		c.wantAnew(b, j.Runtime, "compiling it anew is preferred: "+j.Reason, r)
	case policy.MaxAge > 0 && c.now().Sub(b.Compiled()) > policy.MaxAge:
		c.wantAnew(b, j.Runtime, fmt.Sprintf("older than %s", policy.MaxAge), r)
	}
}
