package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// compileAnew compiles what the task asks for, unless that is settled already, and publishes it in the build's scope.
// It says how much processor time the workers took.
func (c *Cache) compileAnew(ctx context.Context, t *task) (time.Duration, error) {
	builds, err := c.index.Lookup(t.key.request, t.key.scope)
	if err != nil {
		return 0, err
	}
	if len(builds) == 0 {
		return 0, settled("the builds of the request are gone")
	}
	// The build that was wished for may have been made anew meanwhile, but its request is that of all of them.
	b := &builds[max(0, slices.IndexFunc(builds, func(b index.Build) bool { return b.ID == t.build }))]
	at, err := c.planAnew(ctx, t, b)
	if err == nil {
		t.rc = at.rc
		err = c.needed(t, builds, at.plan)
	}
	var m *kept
	if err == nil {
		m, err = c.modelFor(ctx, t, b, builds)
	}
	var cpu time.Duration
	if err == nil {
		defer m.request.close()
		cpu, err = c.flyAnew(ctx, t, b, m, at.withRequest(m.request))
	}
	c.tellUnmade(ctx, b, err)
	return cpu, err
}

// flyAnew runs the compile, or waits for that of a request for the same.
func (c *Cache) flyAnew(ctx context.Context, t *task, b *index.Build, m *kept, at *attempt) (time.Duration, error) {
	c.happened(event.Of(b, event.Rebuild, "%s", t.why))
	var own *job
	key := flightKey{build: at.plan.buildKey, scope: b.Scope}
	result, _, err := c.flights.join(ctx, key, asking{idle: true}, func() (runner, error) {
		j, err := c.newJob(at, b.Scope)
		if err != nil {
			return nil, err
		}
		own = j
		j.id, j.anew, j.sources, j.replaces, j.foreign = t.id, t.why, m.sources, b.ID, m.foreign
		return j, nil
	})
	var cpu time.Duration
	if own != nil {
		cpu = time.Duration(own.cpu.Load())
	}
	if errors.Is(err, errGivenUp) {
		return cpu, settled("cancelled")
	}
	if err == nil && result.alone != nil {
		return cpu, settled("not kept: %s %v", result.why, result.build.Warnings)
	}
	return cpu, err
}

// planAnew thinks the build's request through for the runtime that it is to be made for.
func (c *Cache) planAnew(ctx context.Context, t *task, b *index.Build) (*attempt, error) {
	at, err := c.attemptOf(b)
	if err != nil {
		return nil, err
	}
	rc, err := c.runtimeAnew(ctx, t, b, at.Request)
	if err != nil {
		return nil, err
	}
	if at, err = c.planned(ctx, at.withRuntime("", rc)); err != nil {
		return nil, err
	}
	if now := at.plan.requestKey; now != b.RequestKey {
		return nil, fmt.Errorf("request %s means another one now, %s", b.RequestKey, now)
	}
	return at, nil
}

func (c *Cache) runtimeAnew(ctx context.Context, t *task, b *index.Build, r *Request) (*runtimeContent, error) {
	quiet := func(string) {}
	if t.runtime != nil && !c.runtimes.has(t.runtime) {
		return nil, settled("runtime %q is not registered any more", t.runtime.name)
	}
	if t.runtime != nil {
		rc, err := c.content(ctx, t.runtime, quiet)
		if err == nil && !rc.hasAll(r.EPs) {
			err = apierr.New(apierr.Unavailable, nil, "runtime %q has not all of %s any more", t.runtime.name, epNames(r.EPs))
		}
		return rc, err
	}
	for _, ep := range b.EPs {
		r.Runtime.EPLibraries = append(r.Runtime.EPLibraries, EPLibraryRef{EP: ep.Name, Path: ep.Library})
	}
	if len(r.Runtime.EPLibraries) > 0 {
		if _, rc, err := c.resolveLibraries(ctx, r, quiet); err == nil {
			return rc, nil
		}
	}
	_, rc, err := c.resolveDefault(ctx, r, quiet)
	return rc, err
}

// needed says that it is settled if there is a build already that is what would be made.
func (c *Cache) needed(t *task, builds []index.Build, p *plan) error {
	for i := range builds {
		have := &builds[i]
		if !p.exactly(have) || c.index.Journal.StateOf(have.ID).Name != index.Current {
			continue
		}
		if have.ID != t.build || !t.refresh || c.now().Sub(have.Created) < refreshEvery && !c.tooOld(have) {
			return settled("build %s is there", have.ID)
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
		c.rebuilds.want(wish{build: b, why: "it was damaged: " + s.Reason, delay: healDelay})
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
	request *Request
	sources []index.Source // where its models are from; none: from a request
	foreign bool           // the files came from another user than the build's
}

// modelFor opens the model: the files of the request that asked, or else a source that one of the request's builds
// has, its own first.
func (c *Cache) modelFor(ctx context.Context, t *task, b *index.Build, builds []index.Build) (*kept, error) {
	if t.request != nil {
		if r, err := c.askedWith(ctx, t.request, b); err == nil {
			return &kept{request: r, foreign: t.request.Peer.UID != r.Peer.UID}, nil
		} else if ctx.Err() != nil {
			return nil, err
		}
	}
	r, first := c.sourceRequest(ctx, b)
	if first == nil {
		return &kept{request: r, sources: sourcesOf(b)}, nil
	}
	for i := range builds {
		if builds[i].ID == b.ID || builds[i].Source.Kind == "" || ctx.Err() != nil {
			continue
		}
		if r, err := c.sourceRequest(ctx, &builds[i]); err == nil {
			return &kept{request: r, sources: sourcesOf(&builds[i])}, nil
		}
	}
	return nil, first
}

// sourcesOf lists where the models of a build are, one for each.
func sourcesOf(b *index.Build) []index.Source {
	list := []index.Source{b.Source}
	for i := 1; i < len(b.Members); i++ {
		list = append(list, b.Members[i].Source)
	}
	return list
}

// askedWith gives the build's request with the files of another that means the same, if they are what they were then.
func (c *Cache) askedWith(ctx context.Context, asked *Request, b *index.Build) (*Request, error) {
	at, err := c.attemptOf(b)
	if err != nil {
		return nil, err
	}
	r := at.Request
	files, err := asked.own()
	if err != nil {
		return nil, err
	}
	r.Graph, r.External, r.Group = files.Graph, files.External, files.Group
	return r, c.sameModel(ctx, r, at.model)
}

// tellUnmade writes into the history why a build was not made anew, where that is not how things are anyway: a source
// that was never kept is not worth a line for each of thousands.
func (c *Cache) tellUnmade(ctx context.Context, b *index.Build, err error) {
	if err == nil || ctx.Err() != nil || errors.Is(err, errSettled) || errors.Is(err, errNoSource) && b.Source.Kind == "" {
		return
	}
	if !errors.Is(err, errNoSource) {
		c.index.Counters.Add("failures", 1)
	}
	c.log.Info("not compiled anew", "model", b.ModelName, "build", b.BuildKey.String(), "why", err)
	c.happened(event.Of(b, event.NotRebuilt, "%v", err))
}
