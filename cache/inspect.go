package cache

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// Listing is a build with what is known of its use.
type Listing struct {
	Build    index.Build
	State    index.State
	LastUsed time.Time
	Hits     uint64
	Leased   bool
	Pinned   bool  // it is not collected
	Own      int64 // bytes on disk that its removal would free now; filled in where it is asked for

	Judgement Judgement // the best for the runtimes that are here
	Gain      Gain
}

// ListFilter narrows List. Empty fields match all.
type ListFilter struct {
	Model string // a prefix of the model digest, or part of the model's name
	EP    string
	After string // the page token of the last answer
	Limit int
}

// List pages through the builds that the peer may see, in the order of their ids. next is empty on the last page.
func (c *Cache) List(ctx context.Context, p Peer, f ListFilter) (page []Listing, next string, err error) {
	if f.Limit <= 0 || f.Limit > 500 {
		f.Limit = 500
	}
	var all []index.Build
	err = c.index.Each(ctx, func(b index.Build) error {
		if c.maySee(p, &b) && f.matches(&b) && b.ID.String() > f.After {
			all = append(all, b)
		}
		return nil
	})
	if err != nil {
		return nil, "", fail(Internal, err, "list")
	}
	slices.SortFunc(all, func(a, b index.Build) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	if len(all) > f.Limit {
		all = all[:f.Limit]
		next = all[f.Limit-1].ID.String()
	}
	for _, b := range all {
		page = append(page, c.listing(b))
	}
	return page, next, nil
}

func (f *ListFilter) matches(b *index.Build) bool {
	if f.Model != "" && !slices.ContainsFunc(modelsOf(b), func(m index.Member) bool {
		return strings.HasPrefix(m.ModelDigest.String(), f.Model) || strings.Contains(m.ModelName, f.Model)
	}) {
		return false
	}
	return f.EP == "" || slices.ContainsFunc(b.EPs, func(e index.EPFacts) bool { return e.Name == f.EP })
}

func (c *Cache) listing(b index.Build) Listing {
	l := Listing{Build: b, State: c.index.StateOf(b.ID), Judgement: c.standing(&b)}
	if l.State.Name == "" {
		l.State.Name = index.Current
	}
	l.LastUsed, l.Hits = c.index.LastUse(b.ID)
	c.uses.mu.Lock()
	if u := c.uses.since[b.ID]; u != nil {
		l.Hits += u.hits
		l.LastUsed = u.last
	}
	c.uses.mu.Unlock()
	l.Gain = c.gains.of(b.ID)
	_, l.Pinned = c.index.Pinned(b.ID)
	l.Build.Warnings = slices.Concat(b.Warnings, c.gains.warnings(b.ID))
	c.views.mu.Lock()
	v := c.views.live[b.ID]
	c.views.mu.Unlock()
	if v != nil {
		l.Leased, _ = leased(v.path) // a folder that cannot be opened is held by nobody
	}
	return l
}

// Show gives the builds that a name means, and the history of their requests.
func (c *Cache) Show(ctx context.Context, p Peer, name string) ([]Listing, []string, error) {
	builds, err := c.find(ctx, p, []string{name})
	if err != nil {
		return nil, nil, err
	}
	var out []Listing
	var history []string
	told := make(map[index.RequestKey]bool)
	for _, b := range builds {
		out = append(out, c.listing(b))
		if told[b.RequestKey] {
			continue
		}
		told[b.RequestKey] = true
		events, err := c.index.History(b.RequestKey)
		if err != nil {
			return nil, nil, fail(Internal, err, "history of %s", b.RequestKey)
		}
		for _, e := range events {
			history = append(history, fmt.Sprintf("%s %s: %s", e.At.Format(time.RFC3339), e.Kind, e.Text))
		}
	}
	return out, history, nil
}

// minPrefix is the shortest prefix of a digest that names something.
const minPrefix = 8

// find gives the builds that the names mean: a request key, build key, build id or model digest, a prefix of one,
// or the model's name. A name that means nothing is an error.
func (c *Cache) find(ctx context.Context, p Peer, names []string) ([]index.Build, error) {
	used := make([]bool, len(names))
	var out []index.Build
	err := c.index.Each(ctx, func(b index.Build) error {
		if !c.maySee(p, &b) {
			return nil
		}
		hit := false
		for i, name := range names {
			if means(name, &b) {
				used[i], hit = true, true
			}
		}
		if hit {
			out = append(out, b)
		}
		return nil
	})
	if err != nil {
		return nil, searchError(ctx, err)
	}
	for i, name := range names {
		if !used[i] {
			return nil, fail(NotFound, nil, "no entry %q", name).hint("epcachectl list shows what there is")
		}
	}
	return out, nil
}

// modelsOf lists the models of a build: one, or those of a group.
func modelsOf(b *index.Build) []index.Member {
	if len(b.Members) > 0 {
		return b.Members
	}
	return []index.Member{{ModelName: b.ModelName, ModelDigest: b.ModelDigest, Graph: b.Graph}}
}

func means(name string, b *index.Build) bool {
	ids := []string{b.RequestKey.String(), b.BuildKey.String(), b.ID.String()}
	for _, m := range modelsOf(b) {
		if name == m.ModelName {
			return true
		}
		ids = append(ids, m.ModelDigest.String())
	}
	if len(name) < minPrefix {
		return false
	}
	for _, id := range ids {
		if strings.HasPrefix(id, name) {
			return true
		}
	}
	return false
}

// Administrator tells whether the peer may see and change everything.
func (c *Cache) Administrator(p Peer) bool {
	return p.UID == 0 || p.UID == c.uid || slices.Contains(c.settings.Load().administrators, p.UID)
}

// Publisher tells whether what the peer puts may be shared.
func (c *Cache) Publisher(p Peer) bool {
	return c.Administrator(p) || slices.Contains(c.settings.Load().publishers, p.UID)
}

// maySee: one's own builds, and the shared ones that one had oneself, for whoever had it has the model.
func (c *Cache) maySee(p Peer, b *index.Build) bool {
	if c.Administrator(p) || b.Scope == OwnScope(p) {
		return true
	}
	if b.Scope != "shared" {
		return false
	}
	_, ok := c.index.Memo(seenKey(p, b.ID))
	return ok
}

// OwnScope is the scope of what only this user gets.
func OwnScope(p Peer) string { return fmt.Sprintf("uid:%d", p.UID) }

func seenKey(p Peer, id index.BuildID) []byte {
	return fmt.Appendf(nil, "seen:%d:%s", p.UID, id)
}

// seen remembers that a user had a shared build, so that it may be listed to that user.
func (c *Cache) seen(p Peer, b *index.Build) {
	if b.Scope != "shared" || c.Administrator(p) {
		return
	}
	key := seenKey(p, b.ID)
	if _, ok := c.index.Memo(key); ok {
		return
	}
	if err := c.index.SaveMemo(key, []byte{1}); err != nil {
		c.log.Warn("use by a user not kept", "error", err)
	}
}

// Status is what the cache says of itself.
type Status struct {
	Started      time.Time
	Counters     map[string]uint64
	SavedSeconds float64
	Space        index.Space
	Jobs         int
	Warnings     []string
	Runtimes     []RuntimeFacts // as they were when last looked at, without devices
}

// Status counts.
func (c *Cache) Status(ctx context.Context) (Status, error) {
	c.flushUses()
	space, err := c.index.Space()
	if err != nil {
		return Status{}, fail(Internal, err, "status")
	}
	s := Status{Started: c.started, Counters: c.index.Counters(), Space: space, Jobs: c.flights.count()}
	s.SavedSeconds = float64(s.Counters["saved_milliseconds"]) / 1000
	s.Warnings = c.configured.Load().warnings()
	if why := c.index.Rebuilt(); why != "" {
		s.Warnings = append(s.Warnings, "the index was rebuilt at the start: "+why)
	}
	for _, f := range c.index.Problems() {
		s.Warnings = append(s.Warnings, fmt.Sprintf("%s %s: %s", f.Kind, f.Object, f.Detail))
	}
	for _, rt := range c.runtimes.all() {
		facts := RuntimeFacts{Name: rt.name, Registered: rt.registered, At: c.now(), State: *rt.state.Load(), Watched: c.watcher.How(rt.subject)}
		if rc := rt.facts.Load(); rc == nil {
			facts.Error = "not looked at yet, or not to be used: epcachectl probe tells"
		} else {
			facts.Spec = rc.spec
			for _, l := range rc.spec.EPs {
				facts.Facts.EPs = append(facts.Facts.EPs, compilers.EPProbe{Name: l.EP, Library: l.Path})
			}
		}
		s.Runtimes = append(s.Runtimes, facts)
	}
	if len(s.Runtimes) == 0 {
		s.Warnings = append(s.Warnings, "no runtime is registered: nothing can be compiled for clients that bring none")
	}
	return s, nil
}

// RuntimeFacts is what is known of one runtime.
type RuntimeFacts struct {
	Name       string
	Registered bool
	Spec       compilers.Runtime
	Digests    map[string]string // by EP
	Facts      compilers.Facts
	Marks      map[string]compilers.Fingerprint // by EP, with default options
	MarkErrors map[string]string                // by EP: why there is none
	Drivers    map[string]Driver                // by EP
	Error      string
	At         time.Time

	State    string    // "ready", "changing", "unusable"
	Watched  string    // "inotify", or "polled: <why>"
	Changes  []string  // what was different when it was last assessed, a line each
	Previous time.Time // when it was assessed before that; zero: never
}

// Driver is the version of an execution provider's driver, and where it is from.
type Driver struct {
	Version, Source string
}

// Probe looks at one runtime, or with an empty reference at all of them.
func (c *Cache) Probe(ctx context.Context, p Peer, ref RuntimeRef, fresh bool) ([]RuntimeFacts, error) {
	list := c.runtimes.all()
	if ref.Directory != "" || len(ref.EPLibraries) > 0 {
		rt, _, err := c.resolve(ctx, &Request{Peer: p, Runtime: ref}, func(string) {})
		if err != nil {
			return nil, err
		}
		list = []*runtime{rt}
	}
	if fresh && !c.Administrator(p) {
		return nil, fail(NotAllowed, nil, "probing anew is for administrators")
	}
	var out []RuntimeFacts
	for _, rt := range list {
		out = append(out, c.probeRuntime(ctx, rt, fresh))
		if ctx.Err() != nil {
			return nil, fail(Cancelled, ctx.Err(), "probe")
		}
	}
	return out, nil
}

func (c *Cache) probeRuntime(ctx context.Context, rt *runtime, fresh bool) RuntimeFacts {
	out := RuntimeFacts{Name: rt.name, Registered: rt.registered, At: c.now(), Drivers: make(map[string]Driver),
		Digests: make(map[string]string), Marks: make(map[string]compilers.Fingerprint), MarkErrors: make(map[string]string)}
	rc, err := c.content(ctx, rt, func(string) {})
	out.State, out.Watched = *rt.state.Load(), c.watcher.How(rt.subject)
	if last, ok := c.probes.lastProbe(rt); ok {
		out.Changes, out.Previous = last.Changes, last.Previous
	}
	if err != nil {
		out.Error = err.Error()
		return out
	}
	out.Spec = rc.spec
	for ep, d := range rc.digests {
		out.Digests[ep] = d.String()
	}
	if out.Facts, err = c.probes.facts(ctx, rc, fresh); err != nil {
		out.Error = err.Error()
		return out
	}
	for _, ep := range out.Facts.EPs {
		if ep.Error != "" {
			continue
		}
		mark, err := c.defaultFingerprint(ctx, rc, out.Facts, ep.Name, fresh)
		if err != nil {
			out.MarkErrors[ep.Name] = err.Error()
			continue
		}
		out.Marks[ep.Name] = mark
		if v, source := c.machine.driver(ep.Name, mark); v != "" {
			out.Drivers[ep.Name] = Driver{v, source}
		}
	}
	return out
}

// defaultFingerprint is what a build made with the EP's first device and default options would say of itself.
func (c *Cache) defaultFingerprint(ctx context.Context, rc *runtimeContent, facts compilers.Facts, name string, fresh bool) (compilers.Fingerprint, error) {
	a, err := againstEP(rc, facts, name)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	marks, err := c.probes.fingerprints(ctx, rc, a.eps, fresh)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	if len(marks) == 0 {
		return compilers.Fingerprint{}, errors.New("the worker gave no fingerprint")
	}
	return marks[0], nil
}
