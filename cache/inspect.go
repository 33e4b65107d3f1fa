package cache

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
)

// Listing is a build with what is known of its use.
type Listing struct {
	Build    index.Build
	State    index.State
	LastUsed time.Time
	Hits     uint64
	Leased   bool
	Pinned   bool  // it is not collected
	Own      int64 // bytes on disk that its removal would free now, as far as the peer may know; not there of what was removed

	KeptAs   string // how its files are kept on the disk: "whole", "packed" or "compressed", and ", with a copy"
	KeptText string // of Show and Why: that with what will become of it by itself, in words

	Judgement Judgement // the best for the runtimes that are here
	Gain      Gain
}

// ListFilter narrows List. Empty fields match all.
type ListFilter struct {
	Model string // a prefix of the model digest, or part of the model's name
	EP    string
	After string // the page token of the last answer
	Limit int

	Progress func(Progress) // is told how far a search is that finds little; may be nil
}

// List pages through the builds that the peer may see, in the order of their ids. next is empty on the last page.
func (c *Cache) List(ctx context.Context, p Peer, f ListFilter) (page []Listing, next string, err error) {
	if f.Limit <= 0 || f.Limit > 500 {
		f.Limit = 500
	}
	var after index.BuildID
	if f.After != "" {
		if after, err = index.ParseBuildID(f.After); err != nil {
			return nil, "", refusal.New(refusal.BadRequest, err, "list: page").WithHint("ask from the beginning")
		}
	}
	looked, all := 0, uint64(0)
	if f.Progress != nil {
		space, err := c.index.Space()
		if err != nil {
			return nil, "", refusal.New(refusal.Internal, err, "list")
		}
		all = space.Builds
	}
	err = c.index.EachAfter(ctx, after, func(b index.Build) error {
		if looked++; looked%farAfter == 0 {
			far(f.Progress, "reading builds", "builds", before(b.ID, all), all)
		}
		if !c.maySee(p, &b) || !f.matches(&b) {
			return nil
		}
		if len(page) == f.Limit {
			next = page[f.Limit-1].Build.ID.String()
			return errStop
		}
		page = append(page, c.listing(b))
		return nil
	})
	if err == nil || errors.Is(err, errStop) {
		err = c.fillIn(p, page)
	}
	if err != nil {
		return nil, "", refusal.New(refusal.Internal, err, "list")
	}
	return page, next, nil
}

// before is about how many of so many builds come before this one: ids are random.
func before(id index.BuildID, all uint64) uint64 {
	return uint64(float64(binary.BigEndian.Uint32(id[:])) / (1 << 32) * float64(all))
}

// fillIn says of each how it is kept, and what its removal would free.
func (c *Cache) fillIn(p Peer, list []Listing) error {
	for i := range list {
		list[i].KeptAs = c.formWord(&list[i].Build)
	}
	return c.fillInOwn(p, list)
}

// fillInOwn says of each what its removal would free.
func (c *Cache) fillInOwn(p Peer, list []Listing) error {
	builds := make([]*index.Build, len(list))
	for i := range list {
		builds[i] = &list[i].Build
	}
	own, err := c.ownBytes(p, builds...)
	for i := range own {
		list[i].Own = own[i]
	}
	return err
}

func (f *ListFilter) matches(b *index.Build) bool {
	if f.Model != "" && !slices.ContainsFunc(b.Models(), func(m index.Member) bool {
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
	l.Gain = c.gains.of(b.ID)
	_, l.Pinned = c.index.Pinned(b.ID)
	l.Build.Warnings = slices.Concat(b.Warnings, c.gains.warnings(b.ID))
	if v := c.views.Current(b.ID); v != nil {
		l.Leased, _ = v.Held() // a folder that cannot be opened is held by nobody
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
		one := c.listing(b)
		one.KeptAs, one.KeptText = c.formWord(&b), c.keptAs(&b)
		out = append(out, one)
		if told[b.RequestKey] {
			continue
		}
		told[b.RequestKey] = true
		events, err := c.index.History(b.RequestKey)
		if err != nil {
			return nil, nil, refusal.New(refusal.Internal, err, "history of %s", b.RequestKey)
		}
		for _, e := range events {
			history = append(history, fmt.Sprintf("%s %s: %s", e.At.Format(time.RFC3339), e.Kind, e.Text))
		}
	}
	if err := c.fillInOwn(p, out); err != nil {
		return nil, nil, refusal.New(refusal.Internal, err, "show %q", name)
	}
	return out, history, nil
}

// minPrefix is the shortest prefix of a digest that names something.
const minPrefix = index.MinPrefix

// eachNamed calls fn with every build that one of the names means, each once, as far as the peer may see it: a request key, build key, build
// id or model digest, a prefix of one, or a model's name. A name that means nothing is an error, after fn was called with the others.
func (c *Cache) eachNamed(ctx context.Context, p Peer, names []string, fn func(*index.Build) error) error {
	told := make(map[index.BuildID]bool)
	for _, name := range names {
		used := false
		err := c.index.Named(ctx, name, func(b index.Build) error {
			if !c.maySee(p, &b) {
				return nil
			}
			used = true
			if told[b.ID] {
				return nil
			}
			if len(names) > 1 {
				told[b.ID] = true
			}
			return fn(&b)
		})
		if err != nil {
			var e *refusal.Error
			if errors.As(err, &e) {
				return err
			}
			return searchError(ctx, err)
		}
		if !used {
			return refusal.New(refusal.NotFound, nil, "no entry %q", name).WithHint("%s", hintOf(name))
		}
	}
	return nil
}

// hintOf says what to do about a name that means nothing.
func hintOf(name string) string {
	const list = "epcachectl list shows what there is"
	if name != "" && len(name) < minPrefix && strings.Trim(name, "0123456789abcdef") == "" {
		return fmt.Sprintf("of a key at least %d digits are needed; %s", minPrefix, list)
	}
	return list
}

// maxFound bounds the records that are in memory of what names mean. Applications that call all their models one name have more.
const maxFound = 1000

// find gives the builds that the names mean, see eachNamed.
func (c *Cache) find(ctx context.Context, p Peer, names []string) (out []index.Build, err error) {
	err = c.eachNamed(ctx, p, names, func(b *index.Build) error {
		if len(out) == maxFound {
			return refusal.New(refusal.BadRequest, nil, "%q means more than %d builds", names, maxFound).WithHint("name one by its key: epcachectl list --model NAME shows them")
		}
		out = append(out, *b)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// idsOf gives the ids of the builds that the names mean, see eachNamed.
func (c *Cache) idsOf(ctx context.Context, p Peer, names []string) (ids []index.BuildID, err error) {
	err = c.eachNamed(ctx, p, names, func(b *index.Build) error {
		ids = append(ids, b.ID)
		return nil
	})
	return ids, err
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
	Space        SpaceReport
	Jobs         int
	Warnings     []string
	Runtimes     []RuntimeFacts // as they were when last looked at, without devices
	Sourceless   Sourceless
}

// Status counts.
func (c *Cache) Status(ctx context.Context) (Status, error) {
	space, err := c.Space()
	if err != nil {
		return Status{}, err
	}
	s := Status{Started: c.started, Counters: c.index.Counters(), Space: space, Jobs: c.flights.count()}
	if s.Sourceless, err = c.sourceless(ctx); err != nil {
		return Status{}, refusal.New(refusal.Internal, err, "builds")
	}
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

	unsettled bool // the files changed meanwhile, or it was cancelled: an error among these says nothing of the runtime
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
		return nil, refusal.New(refusal.NotAllowed, nil, "probing anew is for administrators")
	}
	var out []RuntimeFacts
	for _, rt := range list {
		if fresh {
			out = append(out, c.refresh(ctx, rt))
		} else {
			out = append(out, c.probeRuntime(ctx, rt, false))
		}
		if ctx.Err() != nil {
			return nil, refusal.New(refusal.Cancelled, ctx.Err(), "probe")
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
		out.Error, out.unsettled = err.Error(), unsettled(ctx, err)
		return out
	}
	out.Spec = rc.spec
	for ep, d := range rc.digests {
		out.Digests[ep] = d.String()
	}
	if out.Facts, err = c.probes.facts(ctx, byItself(), rc, fresh); err != nil {
		out.Error, out.unsettled = err.Error(), unsettled(ctx, err)
		return out
	}
	for _, ep := range out.Facts.EPs {
		if ep.Error != "" {
			continue
		}
		mark, err := c.defaultFingerprint(ctx, rc, out.Facts, ep.Name, fresh)
		if err != nil {
			out.MarkErrors[ep.Name] = err.Error()
			out.unsettled = out.unsettled || unsettled(ctx, err)
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
	marks, err := c.probes.fingerprints(ctx, byItself(), rc, a.eps, fresh)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	if len(marks) == 0 {
		return compilers.Fingerprint{}, errors.New("the worker gave no fingerprint")
	}
	return marks[0], nil
}

var errStop = errors.New("enough")
