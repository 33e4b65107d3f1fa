package judge

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store"
)

// JudgeAll judges every stored build that a runtime could load, once for each distinct maker. It
// loads no build, and only asks the execution providers for verdicts. It queues rebuilds of builds
// that the runtime's previous libraries made and that are not optimal now, and of builds that
// changed rules judge worse than before.
func (x *Judge) JudgeAll(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content,
	previous map[string]string, isNew bool) (done bool) {
	under, verdicts := x.generation(), x.Verdicts(rc)
	last := verdicts.lots.Load()
	var before map[maker]*lot
	if last != nil {
		before = last.lots
	}
	lots := make(map[maker]*lot)
	// only ids, because a change of libraries may affect all builds, and all records might not fit
	// into memory
	var affected []index.BuildID
	half := store.Pace{Last: time.Now()}
	err := x.Index.Each(ctx, func(b index.Build) error {
		if err := half.Pause(ctx); err != nil || !rc.HasEvery(&b) {
			return err
		}
		m := makerOf(&b)
		l := lots[m]
		if l == nil {
			j, err := x.judgeLot(ctx, rt, rc, &b)
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
		if l.judgement.Verdict != compilers.Optimal &&
			(isNew && madeBy(&b, previous) || l.before != nil &&
				Rank(l.judgement.Verdict) > Rank(l.before.Verdict)) {
			affected = append(affected, b.ID)
		}
		return nil
	})
	if err != nil {
		if ctx.Err() == nil {
			x.Log.Warn("cannot judge builds", "runtime", rt.Name, "error", err)
		}
		return false
	}
	verdicts.lots.Store(&judgedLots{lots, under})
	for _, m := range slices.Sorted(maps.Keys(lots)) {
		if isNew || lots[m].changed() {
			x.reportLot(rt, lots[m])
		}
	}
	what := "rules or policies"
	if isNew {
		what = "the runtime"
	}
	x.rebuildWorsened(ctx, rt, what+" changed", lots, affected)
	return true
}

// rebuildWorsened reports builds that a change made worse, and queues rebuilds of them.
func (x *Judge) rebuildWorsened(ctx context.Context, rt *runtimes.Runtime, why string,
	lots map[maker]*lot, affected []index.BuildID) {
	for i, id := range affected {
		b, err := x.Index.Get(id)
		l := lots[makerOf(&b)]
		if ctx.Err() != nil {
			return
		}
		if err != nil || l == nil {
			continue // it was just removed
		}
		if i < maxReportedBuilds {
			x.Event(event.Of(&b, event.Judged, "%s for %s now: %s", l.judgement.Verdict, rt.Name,
				cmp.Or(l.judgement.Reason, "none")))
		}
		if !x.hasOptimal(&b, lots) {
			why := fmt.Sprintf("%s, and this build is %s for %s", why, l.judgement.Verdict, rt.Name)
			x.Rebuild(&b, rt.Name, why)
		}
	}
}

// hasOptimal reports whether another build of the same request is optimal, so that it is served
// instead.
func (x *Judge) hasOptimal(b *index.Build, lots map[maker]*lot) bool {
	builds, err := x.Index.Lookup(b.RequestKey, b.Scope)
	return err == nil && slices.ContainsFunc(builds, func(one index.Build) bool {
		l := lots[makerOf(&one)]
		return l != nil && l.judgement.Verdict == compilers.Optimal &&
			x.Index.Journal.StateOf(one.ID).Name == index.Current
	})
}

// maxReportedBuilds bounds the events about single builds after one change.
const maxReportedBuilds = 200

func (x *Judge) reportLot(rt *runtimes.Runtime, l *lot) {
	what := "1 build"
	if l.builds > 1 {
		what = fmt.Sprintf("%d builds", l.builds)
	}
	text := fmt.Sprintf("%s by %s: %s", what, MakerNames(&l.example), l.judgement.Verdict)
	if l.judgement.Source != "" {
		text += fmt.Sprintf(" (%s: %s)", l.judgement.Source, l.judgement.Reason)
	}
	x.Event(index.Event{Kind: event.Judged, Runtime: rt.Name, Text: text})
}

func madeBy(b *index.Build, libraries map[string]string) bool {
	return !slices.ContainsFunc(b.EPs, func(f index.EPFacts) bool {
		return libraries[f.Name] != f.LibraryDigest.String()
	})
}

// judgeLot judges one build on behalf of all builds of its maker, with the fingerprint that its own
// request would have now. If its request cannot be planned, the judgement is empty, because the
// build cannot be loaded either.
func (x *Judge) judgeLot(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content,
	b *index.Build) (Judgement, error) {
	t, err := x.Target(ctx, rt, rc, b)
	if err == nil {
		return x.Glance(ctx, t, b)
	}
	if runtimes.IsTransient(ctx, err) {
		return Judgement{}, err
	}
	return Judgement{At: x.Now(), Runtime: rt.Name,
		Reason: "these execution providers cannot compile on this machine: " + err.Error()}, nil
}

// Verdicts remembers how builds of other libraries suit a runtime with certain contents. Each call
// names the generation of rules and policies that the caller uses, and verdicts of other
// generations do not count. The zero value is ready for use.
type Verdicts struct {
	known memo.Table[memo.GenerationKey[index.BuildID], Judgement]
	lots  atomic.Pointer[judgedLots] // nil until JudgeAll has set them
}

// judgedLots has the judgements of JudgeAll by maker.
type judgedLots struct {
	lots  map[maker]*lot
	under uint64
}

// maxJudged bounds the memory that judgements take.
const maxJudged = 1 << 16

func (vs *Verdicts) load(id index.BuildID, generation uint64) (Judgement, bool) {
	return vs.known.Load(memo.GenerationKey[index.BuildID]{Generation: generation, Key: id})
}

func (vs *Verdicts) save(id index.BuildID, j Judgement, generation uint64) {
	vs.known.Save(memo.GenerationKey[index.BuildID]{Generation: generation, Key: id}, j, maxJudged)
}

// glance returns the remembered judgement of the build, otherwise that of its maker.
func (vs *Verdicts) glance(b *index.Build, generation uint64) (Judgement, bool) {
	if j, ok := vs.load(b.ID, generation); ok {
		return j, true
	}
	if last := vs.lots.Load(); last != nil && last.under == generation {
		if l := last.lots[makerOf(b)]; l != nil {
			return l.judgement, true
		}
	}
	return Judgement{}, false
}

// maker encodes the facts that a judgement without loading depends on. All builds with one maker
// get the same judgement.
type maker string

func makerOf(b *index.Build) maker {
	var s strings.Builder
	for i := range b.EPs {
		f := &b.EPs[i]
		fmt.Fprintf(&s, "%q %t %x %q %q %q %q ", f.Name, f.TookNone, f.LibraryDigest, f.SDKVersion,
			f.HardwareArchitecture, f.CompatibilityString, f.DriverVersion)
	}
	return maker(fmt.Sprintf("%s%s %d %t", s.String(), b.ORTVersion, b.IRVersion,
		b.LoadCheck == compilers.Failed))
}

// lot is the builds of one maker.
type lot struct {
	judgement Judgement
	before    *Judgement // the previous judgement, nil if there is none
	example   index.Build
	builds    int
}

// changed reports whether the previous judgement was different.
func (l *lot) changed() bool {
	return l.before != nil &&
		(l.before.Verdict != l.judgement.Verdict || l.before.Source != l.judgement.Source)
}
