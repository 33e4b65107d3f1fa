package cache

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store"
)

// probed is what a runtime was when it was last assessed. It is remembered over restarts, so that a change while the
// daemon was away is noticed.
type probed struct {
	At         time.Time
	ORTVersion string
	EPs        map[string]probedEP
	Changes    []string  // against the assessment before
	Previous   time.Time // when that was; zero: never
}

type probedEP struct {
	Version, LibraryDigest, SDKVersion, Hardware, Compatibility, Driver, Error string
	Devices                                                                    []string
}

func (p *probes) lastProbe(rt *runtime) (last probed, ok bool) {
	return memo.Recall[probed](p.book, "probed:"+rt.subject)
}

// assess probes a runtime that is new or changed, says what is different, and judges what is stored for it. Where its
// files moved meanwhile nothing is said; it stays due, until it is found at rest.
func (c *Cache) assess(ctx context.Context, rt *runtime) {
	rt.due.Store(true)
	facts := c.probeRuntime(ctx, rt, false)
	if ctx.Err() != nil || facts.unsettled {
		return
	}
	if facts.Error != "" {
		if rt.state.Load() == &stateReady { // else told by whoever found that it cannot be used
			c.log.Warn("runtime cannot be probed", "runtime", rt.name, "error", facts.Error)
			c.happened(Event{Kind: event.Unusable, Runtime: rt.name, Text: facts.Error})
		}
		return
	}
	now := c.summary(&facts)
	before, known := c.probes.lastProbe(rt)
	if known {
		now.Previous, now.Changes = before.At, before.differences(&now)
	}
	if known && len(now.Changes) == 0 {
		now.Previous, now.Changes = before.Previous, before.Changes // what changed last stays to be seen
	} else {
		c.tellProbed(rt, &now, known)
	}
	rc := rt.facts.Load()
	if rc == nil || !c.judgeAll(ctx, rt, rc, before.libraries(), !known || !now.Previous.Equal(before.Previous)) {
		return // the next assessment compares with the same one as this
	}
	rt.due.Store(false)
	// Not saved costs the comparison at the next start, nothing else.
	_ = memo.Save(c.probes.book, "probed:"+rt.subject, now)
}

func (c *Cache) tellProbed(rt *runtime, now *probed, known bool) {
	e := Event{Kind: event.Probed, Runtime: rt.name, Text: "ONNX Runtime " + now.ORTVersion}
	for _, name := range sortedKeys(now.EPs) {
		ep := now.EPs[name]
		e.Text += fmt.Sprintf(", %s %s (SDK %s)", name, ep.Version, ep.SDKVersion)
		if ep.Error != "" {
			e.Text += ": " + ep.Error
		}
	}
	if known {
		e.Kind, e.Text = event.Changed, strings.Join(now.Changes, "; ")
	}
	c.happened(e)
}

func (c *Cache) summary(facts *RuntimeFacts) probed {
	out := probed{At: c.now(), ORTVersion: facts.Spec.ORTVersion, EPs: make(map[string]probedEP)}
	for _, ep := range facts.Facts.EPs {
		mark := facts.Marks[ep.Name]
		one := probedEP{Version: mark.EPVersion, LibraryDigest: facts.Digests[ep.Name], SDKVersion: mark.SDKVersion,
			Hardware: mark.Hardware(), Compatibility: mark.CompatibilityString, Error: ep.Error}
		if one.Error == "" {
			one.Error = facts.MarkErrors[ep.Name]
		}
		one.Driver, _ = c.machine.Driver(ep.Name, mark)
		for _, d := range ep.Devices {
			one.Devices = append(one.Devices, fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
		out.EPs[ep.Name] = one
	}
	return out
}

func (p *probed) libraries() map[string]string {
	out := make(map[string]string, len(p.EPs))
	for name, ep := range p.EPs {
		out[name] = ep.LibraryDigest
	}
	return out
}

// differences says for people what is different now, a line for each.
func (p *probed) differences(now *probed) (lines []string) {
	add := func(what, from, to string) {
		if from != to {
			lines = append(lines, fmt.Sprintf("%s: %s, was %s", what, orNone(to), orNone(from)))
		}
	}
	add("ONNX Runtime", p.ORTVersion, now.ORTVersion)
	names := slices.Compact(slices.Sorted(slices.Values(append(sortedKeys(p.EPs), sortedKeys(now.EPs)...))))
	for _, name := range names {
		a, hadIt := p.EPs[name]
		b, hasIt := now.EPs[name]
		switch {
		case !hadIt:
			lines = append(lines, name+": new here, version "+orNone(b.Version))
			continue
		case !hasIt:
			lines = append(lines, name+": not here any more, was version "+orNone(a.Version))
			continue
		}
		add(name+" version", a.Version, b.Version)
		add(name+" SDK", a.SDKVersion, b.SDKVersion)
		add(name+" hardware", a.Hardware, b.Hardware)
		add(name+" driver", a.Driver, b.Driver)
		add(name+" devices", strings.Join(a.Devices, ", "), strings.Join(b.Devices, ", "))
		add(name+" error", a.Error, b.Error)
		if a.LibraryDigest != b.LibraryDigest {
			add(name+" library", fmt.Sprintf("%.12s", a.LibraryDigest), fmt.Sprintf("%.12s", b.LibraryDigest))
		} else {
			add(name+" compatibility", a.Compatibility, b.Compatibility)
		}
	}
	return lines
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

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
func (c *Cache) judgeAll(ctx context.Context, rt *runtime, rc *runtimeContent, former map[string]string, tell bool) (done bool) {
	under, last := c.settings.Load().judging, rc.judged.lots.Load()
	var before map[maker]*lot
	if last != nil {
		before = last.lots
	}
	lots := make(map[maker]*lot)
	var affected []index.BuildID // a change of libraries may affect all: records would not fit into memory
	half := store.Pace{Last: time.Now()}
	err := c.index.Each(ctx, func(b index.Build) error {
		if err := half.Rest(ctx); err != nil || !rc.hasEvery(&b) {
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
			c.log.Warn("builds not judged", "runtime", rt.name, "error", err)
		}
		return false
	}
	rc.judged.lots.Store(&judgedLots{lots, under})
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
func (c *Cache) rebuildAffected(ctx context.Context, rt *runtime, why string, lots map[maker]*lot, affected []index.BuildID) {
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
			c.happened(event.Of(&b, event.Judged, "%s for %s now: %s", l.judgement.Verdict, rt.name, orNone(l.judgement.Reason)))
		}
		if !c.optimalThere(&b, lots) {
			c.wantAnew(&b, rt.name, fmt.Sprintf("%s, and this build is %s for %s", why, l.judgement.Verdict, rt.name), nil)
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

func (c *Cache) tellLot(rt *runtime, l *lot) {
	what := "1 build"
	if l.builds > 1 {
		what = fmt.Sprintf("%d builds", l.builds)
	}
	text := fmt.Sprintf("%s by %s: %s", what, makerNames(&l.example), l.judgement.Verdict)
	if l.judgement.Source != "" {
		text += fmt.Sprintf(" (%s: %s)", l.judgement.Source, l.judgement.Reason)
	}
	c.happened(Event{Kind: event.Judged, Runtime: rt.name, Text: text})
}

func (rc *runtimeContent) hasEvery(b *index.Build) bool {
	for i := range b.EPs {
		if _, ok := rc.library(b.EPs[i].Name); !ok {
			return false
		}
	}
	return len(b.EPs) > 0
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
func (c *Cache) judgeLot(ctx context.Context, rt *runtime, rc *runtimeContent, b *index.Build) (Judgement, error) {
	at, err := c.attemptOf(b)
	if err == nil {
		if at, err = c.planned(ctx, at.withRuntime(rt.name, rc)); err == nil {
			return c.glance(ctx, at.plan.against(rt.name, rc), b)
		}
	}
	if unsettled(ctx, err) {
		return Judgement{}, err
	}
	return Judgement{At: c.now(), Runtime: rt.name, Reason: "nothing can be compiled with these execution providers here: " + err.Error()}, nil
}

// refresh probes a runtime again, whatever is remembered. Where it finds another SDK, driver or
// device although neither the files nor the machine changed, the runtime counts as another one: no
// plan, verdict or load check of before is used for it.
func (c *Cache) refresh(ctx context.Context, rt *runtime) RuntimeFacts {
	before := c.probeRuntime(ctx, rt, false)
	after := c.probeRuntime(ctx, rt, true)
	seen := runtimes.MachineID(after.likeness(&before))
	if ctx.Err() != nil || after.unsettled || before.unsettled || seen == before.likeness(&after) {
		return after
	}
	// Not saved costs what it prevents only if the daemon starts again before the next refresh.
	_ = c.probes.book.Save(noticedKey(rt), seen[:])
	rt.noticed.Store(&seen)
	return c.probeRuntime(ctx, rt, false) // as what it is from now on
}

func noticedKey(rt *runtime) []byte { return []byte("noticed:" + rt.subject) }

// recallNoticed is for a runtime that this process has not looked at yet.
func (c *Cache) recallNoticed(rt *runtime) {
	raw, ok := c.probes.book.Get(noticedKey(rt))
	if ok && len(raw) == len(runtimes.MachineID{}) && rt.noticed.Load() == nil {
		seen := runtimes.MachineID(raw)
		rt.noticed.Store(&seen)
	}
}

// likeness digests what a probe found of those execution providers that worked both times.
func (f *RuntimeFacts) likeness(other *RuntimeFacts) [32]byte {
	type likeness struct {
		Devices []compilers.DeviceFacts
		Mark    compilers.Fingerprint
	}
	all := make(map[string]likeness)
	for _, ep := range f.Facts.EPs {
		one := likeness{Devices: ep.Devices}
		if _, both := other.Marks[ep.Name]; both {
			one.Mark = f.Marks[ep.Name]
			one.Mark.Seconds = 0
		}
		works := func(p compilers.EPProbe) bool { return p.Name == ep.Name && p.Error == "" }
		if works(ep) && slices.ContainsFunc(other.Facts.EPs, works) {
			all[ep.Name] = one
		}
	}
	raw, err := json.Marshal(all)
	if err != nil {
		return [32]byte{} // texts and numbers can always be marshalled
	}
	return digestOf(raw)
}
