package cache

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// maker is what a glance at a build depends on: all builds with one maker are judged alike.
type maker string

func makerOf(b *index.Build) maker {
	var s strings.Builder
	for i := range b.EPs {
		f := &b.EPs[i]
		fmt.Fprintf(&s, "%q %t %x %q %q %q %q ", f.Name, f.TookNone, f.LibraryDigest, f.SDKVersion,
			f.HardwareArchitecture, f.CompatibilityString, f.DriverVersion)
	}
	return maker(s.String() + b.ORTVersion)
}

// lot is the builds of one maker.
type lot struct {
	judgement Judgement
	before    *Judgement // as it was judged before, nil if it was not
	example   index.Build
	builds    int
}

// changed tells whether it was judged otherwise before, and worse whether it was judged better.
func (l *lot) changed() bool {
	return l.before != nil && (l.before.Verdict != l.judgement.Verdict || l.before.Source != l.judgement.Source)
}

func (l *lot) worse() bool {
	return l.before != nil && badness(l.judgement.Verdict) > badness(l.before.Verdict)
}

// judgeAll judges everything stored that a runtime could load, once for each distinct maker, without running anything
// but the execution providers' own verdicts. What was made by the runtime's former libraries and is not the best any
// more is wanted anew, and so is what is judged worse than before by other rules.
func (c *Cache) judgeAll(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content, former map[string]string, tell bool) (done bool) {
	under, last := c.settings.Load().judging, notesOn(rc).verdicts.lots.Load()
	var before map[maker]*lot
	if last != nil {
		before = last.lots
	}
	lots := make(map[maker]*lot)
	var affected []index.BuildID // a change of libraries may affect all: records would not fit into memory
	half := store.Pace{Last: time.Now()}
	err := c.index.Each(ctx, func(b index.Build) error {
		if err := half.Rest(ctx); err != nil || !rc.HasEvery(&b) {
			return err
		}
		m := makerOf(&b)
		l := lots[m]
		if l == nil {
			j, err := c.judgeLot(ctx, rt, rc, &b)
			if err != nil {
				return err
			}
			l = &lot{judgement: j, example: b}
			if old := before[m]; old != nil {
				l.before = &old.judgement
			}
			lots[m] = l
		}
		l.builds++
		if l.judgement.Verdict != compilers.Optimal && (tell && madeBy(&b, former) || l.worse()) {
			affected = append(affected, b.ID)
		}
		return nil
	})
	if err != nil {
		if ctx.Err() == nil {
			c.log.Warn("builds not judged", "runtime", rt.Name, "error", err)
		}
		return false
	}
	notesOn(rc).verdicts.lots.Store(&judgedLots{lots, under})
	for _, m := range slices.Sorted(maps.Keys(lots)) {
		if tell || lots[m].changed() {
			c.tellLot(rt, lots[m])
		}
	}
	what := "rules or policies"
	if tell {
		what = "the runtime"
	}
	c.rebuildAffected(ctx, rt, what+" changed", lots, affected)
	return true
}

// rebuildAffected tells of builds that a change made worse, and wants them anew where nothing better is there.
func (c *Cache) rebuildAffected(ctx context.Context, rt *runtimes.Runtime, why string, lots map[maker]*lot, affected []index.BuildID) {
	for i, id := range affected {
		b, err := c.index.Get(id)
		l := lots[makerOf(&b)]
		if ctx.Err() != nil {
			return
		}
		if err != nil || l == nil {
			continue // it has just gone
		}
		if i < maxTold {
			c.happened(event.Of(&b, event.Judged, "%s for %s now: %s", l.judgement.Verdict, rt.Name, orNone(l.judgement.Reason)))
		}
		if !c.optimalThere(&b, lots) {
			c.wantAnew(&b, rt.Name, fmt.Sprintf("%s, and this build is %s for %s", why, l.judgement.Verdict, rt.Name), nil)
		}
	}
}

// optimalThere tells whether one that is served in the build's place is the best there can be.
func (c *Cache) optimalThere(b *index.Build, lots map[maker]*lot) bool {
	builds, err := c.index.Lookup(b.RequestKey, b.Scope)
	return err == nil && slices.ContainsFunc(builds, func(one index.Build) bool {
		l := lots[makerOf(&one)]
		return l != nil && l.judgement.Verdict == compilers.Optimal && c.index.Journal.StateOf(one.ID).Name == index.Current
	})
}

// maxTold bounds the events about single builds after one change.
const maxTold = 200

func (c *Cache) tellLot(rt *runtimes.Runtime, l *lot) {
	what := "1 build"
	if l.builds > 1 {
		what = fmt.Sprintf("%d builds", l.builds)
	}
	text := fmt.Sprintf("%s by %s: %s", what, makerNames(&l.example), l.judgement.Verdict)
	if l.judgement.Source != "" {
		text += fmt.Sprintf(" (%s: %s)", l.judgement.Source, l.judgement.Reason)
	}
	c.happened(Event{Kind: event.Judged, Runtime: rt.Name, Text: text})
}

func madeBy(b *index.Build, libraries map[string]string) bool {
	for i := range b.EPs {
		if libraries[b.EPs[i].Name] != b.EPs[i].LibraryDigest.String() {
			return false
		}
	}
	return true
}

// judgeLot judges one build for all of its maker, with the fingerprint that its own request would give now. Where nothing
// can be compiled nothing can be loaded either, and so nothing is said.
func (c *Cache) judgeLot(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content, b *index.Build) (Judgement, error) {
	at, err := c.attemptOf(b)
	if err == nil {
		if at, err = c.planned(ctx, at.withRuntime(rt.Name, rc)); err == nil {
			return c.glance(ctx, at.plan.against(rt.Name, rc), b)
		}
	}
	if runtimes.Unsettled(ctx, err) {
		return Judgement{}, err
	}
	return Judgement{At: c.now(), Runtime: rt.Name, Reason: "nothing can be compiled with these execution providers here: " + err.Error()}, nil
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// wantAnew has a build compiled anew in the background, for the runtime of that name. A request that it answers, nil if
// there is none, may bring the model.
func (c *Cache) wantAnew(b *index.Build, runtime, why string, r *Request) {
	c.log.Debug("wanted anew", "build", b.BuildKey.String(), "runtime", runtime, "why", why)
	t := rebuild{c: c, runtime: c.runtimes.Named(runtime, b)}
	w := t.wish(b, why)
	w.Refresh, w.Files = true, t.files(r)
	c.rebuilds.Want(w)
}
