package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
)

// Judgement says how a build suits a runtime, and how that is known.
type Judgement struct {
	Verdict compilers.Verdict
	Source  string // "same library", "execution provider", "fingerprint", "load check", "rule NAME"; "": nobody could say
	Reason  string
	At      time.Time
	Runtime string // the runtime's name

	level string // the only graph optimisation level at which it loads, "" if any
	firm  bool   // said by the execution provider, or of its own library: nothing that we try could know better
}

// The sources of judgements, from best to worst; a rule's name follows its word.
const (
	sourceLibrary     = "same library"
	sourceEP          = "execution provider"
	sourceFingerprint = "fingerprint"
	sourceLoadCheck   = "load check"
	sourcePut         = "put" // the caller compiled it itself
	sourceRule        = "rule "
)

// against is what a build is judged against: a runtime, with the execution providers and options of a request.
type against struct {
	*plan
	runtime string
	rc      *runtimes.Content

	model    *Request // a request that has its models with it, for controls; nil: there is none
	adopting bool     // that is of an artefact
}

func (p *plan) against(rt string, rc *runtimes.Content) *against {
	return &against{plan: p, runtime: rt, rc: rc}
}

// key is for what is remembered of a judgement. It covers all that a probe can notice, such as
// another SDK or driver.
func (a *against) key(c *Cache, kind string, more []byte) string {
	return c.runtimes.Key(kind, a.rc, append(a.seen[:], more...))
}

// judged remembers how other libraries' builds suit a runtime with certain contents. What was judged by other rules or
// policies than those in force does not count: each call names the generation that the caller works with,
// settings.judging.
type judged struct {
	known memo.Table[memo.Under[index.BuildID], Judgement]
	lots  atomic.Pointer[judgedLots] // nil: none were set yet
}

// judgedLots are builds by who made them, judged at a glance.
type judgedLots struct {
	lots  map[maker]*lot
	under uint64
}

// maxJudged bounds the memory that judgements take.
const maxJudged = 1 << 16

func (js *judged) load(id index.BuildID, generation uint64) (Judgement, bool) {
	return js.known.Load(memo.Under[index.BuildID]{Generation: generation, Key: id})
}

func (js *judged) save(id index.BuildID, j Judgement, generation uint64) {
	js.known.Save(memo.Under[index.BuildID]{Generation: generation, Key: id}, j, maxJudged)
}

// glanceAt gives what is known of the build, at a glance at least.
func (js *judged) glanceAt(b *index.Build, generation uint64) (Judgement, bool) {
	if j, ok := js.load(b.ID, generation); ok {
		return j, true
	}
	if last := js.lots.Load(); last != nil && last.under == generation {
		if l := last.lots[makerOf(b)]; l != nil {
			return l.judgement, true
		}
	}
	return Judgement{}, false
}

// standing is how a build suits the registered runtimes: the best of what is known.
func (c *Cache) standing(b *index.Build) Judgement {
	var best Judgement
	for _, rt := range c.runtimes.All() {
		rc := rt.Found()
		if rc == nil || !rc.HasEvery(b) {
			continue
		}
		j, ok := notesOn(rc).verdicts.glanceAt(b, c.settings.Load().judging)
		if !ok && rc.Made(b) {
			j, ok = Judgement{Verdict: compilers.Optimal, Source: sourceLibrary, Reason: "made by equal libraries", At: b.Created, Runtime: rt.Name}, true
		}
		if ok && (best.Runtime == "" || badness(j.Verdict) < badness(best.Verdict)) {
			best = j
		}
	}
	return best
}

// judge says how the build suits, from the best source that can tell: its execution provider's own library, the
// provider's verdict, the fingerprint, a load check, the rules. It is worked out once for each build and runtime.
func (c *Cache) judge(ctx context.Context, a *against, b *index.Build) (Judgement, error) {
	if c.readOnly {
		return recorded(a, b), nil
	}
	under := c.settings.Load().judging // before anything that depends on it is read
	if j, ok := notesOn(a.rc).verdicts.load(b.ID, under); ok {
		return j, nil
	}
	if j, ok := c.disproved(a, b); ok {
		notesOn(a.rc).verdicts.save(b.ID, j, under)
		return j, nil
	}
	j, err := c.glance(ctx, a, b)
	if err != nil {
		return j, err
	}
	if b.Put {
		j.firm = false // what it says of itself is what its maker wrote: it is loaded before it is believed
	}
	if c.worthTrying(a, b, j) {
		if j, err = c.tryLoading(ctx, a, b, j); err != nil {
			return j, err
		}
	}
	notesOn(a.rc).verdicts.save(b.ID, j, under)
	return j, nil
}

// worthTrying tells whether a load check could change what becomes of the build. Who refuses what is unknown does so
// whatever loads. A build of another machine is tried whatever is said of it.
func (c *Cache) worthTrying(a *against, b *index.Build, j Judgement) bool {
	policy := c.policyOf(a.eps).Unknown
	if j.Verdict == compilers.Unsupported || policy == PolicyRefuse && j.Verdict == compilers.Unknown {
		return false
	}
	return a.marks.elsewhere(b) || !j.firm && policy != PolicyServe
}

// glance judges without loading the build. With several execution providers the worst counts.
func (c *Cache) glance(ctx context.Context, a *against, b *index.Build) (Judgement, error) {
	var out Judgement
	if len(b.EPs) != len(a.eps) || len(a.eps) == 0 {
		return out, fmt.Errorf("build %s is of %d execution providers, not %d", b.ID, len(b.EPs), len(a.eps))
	}
	for i := range a.eps {
		j, err := c.glanceEP(ctx, a, i, part{&b.EPs[i], b.ORTVersion, b.BuildKey == a.buildKey})
		if err != nil {
			return out, err
		}
		firm := j.firm && (i == 0 || out.firm)
		if i == 0 || badness(j.Verdict) > badness(out.Verdict) || out.Source == sourceLibrary && j.Verdict == out.Verdict {
			out = j
		}
		out.firm = firm
	}
	out.At, out.Runtime = c.now(), a.runtime
	return out, nil
}

// part is what one execution provider made of a build.
type part struct {
	made *index.EPFacts
	ort  string // under which version of ONNX Runtime
	own  bool   // the build has the very key that it is judged for
}

func (c *Cache) glanceEP(ctx context.Context, a *against, i int, b part) (Judgement, error) {
	made, now := b.made, &a.facts[i]
	if made.TookNone {
		return tookNone(made, now), nil
	}
	rule := c.rules().Judge(ruleFacts(made, b.ort), ruleFacts(now, a.rc.Spec.ORTVersion))
	byRule := Judgement{Verdict: rule.Verdict, Source: sourceRule + rule.Rule, Reason: rule.Reason}
	if rule.Rule == "" {
		byRule.Source = ""
	}
	own, equal := a.ownLibrary(i, b)
	if own.firm {
		return own, nil
	}
	verdict, err := c.verdict(ctx, a, i, made.CompatibilityString)
	if err != nil {
		if runtimes.Unsettled(ctx, err) {
			return Judgement{}, err
		}
		verdict = compilers.Unknown // an execution provider that cannot say is no reason to give up
	}
	j := byRule
	switch {
	case verdict != compilers.Unknown:
		j = Judgement{Verdict: verdict, Source: sourceEP, firm: true,
			Reason: fmt.Sprintf("%s %s, asked about what %s made, says %s",
				made.Name, now.Version, makerName(made), verdict)}
	case equal:
		j = own
	case made.CompatibilityString != "" && made.CompatibilityString == now.CompatibilityString:
		j = Judgement{Verdict: compilers.Optimal, Source: sourceFingerprint, firm: true,
			Reason: fmt.Sprintf("what %s compiles now says the same of itself: %s",
				made.Name, shown(made.CompatibilityString))}
	}
	if equal && rule.Rule != "" && badness(rule.Verdict) > badness(j.Verdict) {
		return byRule, nil // such as one about drivers
	}
	return j, nil
}

// tookNone judges the part of an execution provider that took no node of the model.
func tookNone(made, now *index.EPFacts) Judgement {
	j := Judgement{Verdict: compilers.Optimal, Source: sourceLibrary,
		Reason: made.Name + " took no node of it", firm: true}
	if made.LibraryDigest != now.LibraryDigest && !made.LibraryDigest.IsZero() {
		j.Verdict = compilers.PreferRecompilation
		j.Reason += "; the library is another one now, which may take some"
	}
	return j
}

// ownLibrary judges what an equal library made, and tells whether one did. It is firm where nothing
// else changed: the driver and, for execution providers that state no hardware, the machine.
func (a *against) ownLibrary(i int, b part) (j Judgement, equal bool) {
	made, now := b.made, &a.facts[i]
	elsewhere := a.marks.elsewhereEP(i, made)
	if !b.own && (made.LibraryDigest != now.LibraryDigest ||
		made.SDKVersion != now.SDKVersion || made.CompatibilityString != now.CompatibilityString ||
		made.HardwareArchitecture != now.HardwareArchitecture && !elsewhere) {
		return Judgement{}, false
	}
	j = Judgement{Verdict: compilers.Optimal, Source: sourceLibrary,
		Reason: "made by an equal library of " + made.Name, firm: true}
	if made.DriverVersion != now.DriverVersion {
		j.firm = false
		j.Reason += fmt.Sprintf(" with driver %s, and this machine has %s",
			orNone(made.DriverVersion), orNone(now.DriverVersion))
	}
	switch {
	case elsewhere && made.HardwareArchitecture == "":
		j.firm = false
		j.Reason += " on a machine that it does not state"
	case elsewhere:
		j.firm, j.Verdict = false, compilers.PreferRecompilation
		j.Reason += fmt.Sprintf(" on another class of machine, %s", made.HardwareArchitecture)
	}
	return j, true
}

func makerName(f *index.EPFacts) string {
	if f.LibraryDigest.IsZero() {
		return fmt.Sprintf("an unknown library (SDK %s)", cmp.Or(f.SDKVersion, "unknown"))
	}
	return fmt.Sprintf("%s (SDK %s, library %.12s)", cmp.Or(f.Version, "its library"), cmp.Or(f.SDKVersion, "unknown"), f.LibraryDigest)
}

func shown(s string) string {
	const most = 160
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// tryLoading loads the build in a process of its own, and runs it where it may be of another
// machine. Where the target device is here, that proves whether it loads; that it loads does not
// prove that it is the best there could be.
func (c *Cache) tryLoading(ctx context.Context, a *against, b *index.Build, glance Judgement) (Judgement, error) {
	checked, err := c.loadCheck(ctx, a, b)
	if err != nil {
		return glance, err
	}
	out := Judgement{At: c.now(), Runtime: a.runtime, Source: sourceLoadCheck}
	loads := "it loads"
	if checked.Ran {
		loads = "it loads and runs"
	}
	switch checked.Outcome {
	case compilers.Failed:
		out.Verdict, out.Reason = compilers.Unsupported, "it does not load: "+checked.Text
		if checked.Ran {
			out.Reason = "it loads and does not run: " + checked.Text
		}
	case compilers.Passed:
		out.Verdict, out.Reason = compilers.PreferRecompilation, loads
		if !a.rc.Made(b) {
			out.Reason += ", though another library made it: " + makerNames(b)
		}
		if glance.Source == sourceLibrary || glance.Verdict == compilers.Optimal {
			out.Verdict, out.Reason = glance.Verdict, loads+"; "+glance.Reason
		} else if glance.Source != "" {
			out.Reason += "; " + glance.Source + ": " + glance.Reason
		}
		if checked.GraphOptimizationLevel == "disable_all" {
			out.level = checked.GraphOptimizationLevel
		}
	default:
		out = glance
		if out.Source == "" {
			out.Reason = "no rule tells, and whether it loads cannot be tried on this machine"
		}
		if a.marks.elsewhere(b) {
			out.Verdict, out.Source = compilers.Unknown, ""
			out.Reason = "whether it runs on this machine cannot be tried: " + checked.Text
		}
	}
	return out, nil
}

func makerNames(b *index.Build) string {
	out := ""
	for i := range b.EPs {
		if i > 0 {
			out += ", "
		}
		out += b.EPs[i].Name + " " + makerName(&b.EPs[i])
	}
	return out
}

// loadCheck loads the build's graph with the libraries that it is judged for, once for each pair.
// What may be of another machine is run as well.
func (c *Cache) loadCheck(ctx context.Context, a *against, b *index.Build) (compilers.CheckResult, error) {
	if a.marks.elsewhere(b) {
		return c.runCheck(ctx, a, b)
	}
	return c.loadCheckAs(ctx, a, b, "load", a.checkJobOf)
}

// loadCheckAs is loadCheck in one of the ways in which a build is loaded.
func (c *Cache) loadCheckAs(ctx context.Context, a *against, b *index.Build, way string,
	job func(*index.Build, *Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	key := a.key(c, way, b.ID[:])
	return runtimes.Remember(ctx, c.runtimes, runtimes.Question{Key: key}, proven, func(ctx context.Context) (compilers.CheckResult, error) {
		leave, err := c.checks.Take(ctx) // after an update many may be asked for at a time
		if err != nil {
			return compilers.CheckResult{}, err
		}
		defer leave()
		return c.tryView(ctx, a, b, job)
	})
}

func (c *Cache) tryView(ctx context.Context, a *against, b *index.Build,
	job func(*index.Build, *Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	answer, err := c.serve(ctx, b, func(string) {})
	if err != nil {
		return compilers.CheckResult{}, err
	}
	defer answer.View.Close()
	return c.believed(ctx, a, job(b, answer))
}

// checkJob loads a graph as an application would that asked for what is judged.
func (a *against) checkJob(graph, level string) compilers.CheckJob {
	return compilers.CheckJob{Runtime: a.rc.Spec, EPs: a.eps, Graph: graph, SessionOptions: a.canonical.SessionOptions,
		GraphOptimizationLevel: level}
}

// checkJobOf loads a build from its view: a group's graphs together, in order.
func (a *against) checkJobOf(b *index.Build, view *Answer) compilers.CheckJob {
	graph := filepath.Join(view.Path, filepath.FromSlash(view.Graph))
	job := a.checkJob(graph, cmp.Or(b.GraphOptimizationLevel, loadLevel(a.canonical.GraphOptimizationLevel)))
	for i := range b.Members {
		job.SessionOptions = sharingOptions(a.canonical.SessionOptions)
		if i > 0 {
			job.Share = append(job.Share, filepath.Join(filepath.Dir(graph), filepath.FromSlash(b.Members[i].Graph)))
		}
	}
	return job
}

// checkJobAlone loads a group's graphs as checkJobOf does, but none of them shares anything with
// the others.
func (a *against) checkJobAlone(b *index.Build, view *Answer) compilers.CheckJob {
	job := a.checkJobOf(b, view)
	job.SessionOptions = a.canonical.SessionOptions
	return job
}

// spelled is the request but for its model.
func (a *against) spelled() []byte {
	r := a.canonical
	r.Model = cas.Digest{}
	return r.Encode()
}

// verdict asks the execution provider itself what it thinks of a compatibility string, once for each distinct string.
func (c *Cache) verdict(ctx context.Context, a *against, i int, info string) (compilers.Verdict, error) {
	if info == "" {
		return compilers.Unknown, nil
	}
	rc, ep := a.rc, a.eps[i]
	key := a.key(c, "verdict", []byte(ep.Name+"\x00"+info))
	return runtimes.Remember(ctx, c.runtimes, runtimes.Question{Key: key}, always, func(ctx context.Context) (compilers.Verdict, error) {
		return runtimes.Still(rc, func() (compilers.Verdict, error) {
			verdicts, err := c.compiler.Compatibility(ctx, rc.Spec, ep, []string{info})
			var refused *compilers.RefusedError
			if errors.As(err, &refused) || err == nil && len(verdicts) != 1 {
				return compilers.Unknown, nil // it has no word for this: that will not change
			}
			if err != nil {
				return compilers.Unknown, err
			}
			return verdicts[0], nil
		})
	})
}

// worse of two verdicts; not to know is worse than to prefer something else, and better than a refusal.
func worse(a, b compilers.Verdict) compilers.Verdict {
	if badness(b) > badness(a) {
		return b
	}
	return a
}

func badness(v compilers.Verdict) int {
	switch v {
	case compilers.Optimal:
		return 0
	case compilers.PreferRecompilation:
		return 1
	case compilers.Unsupported:
		return 3
	}
	return 2
}

// rules are the administrator's over the shipped ones.
func (c *Cache) rules() *rules.Set { return c.settings.Load().rules }

func ruleFacts(f *index.EPFacts, ort string) rules.Facts {
	return rules.Facts{EP: f.Name, EPVersion: f.Version, LibraryDigest: f.LibraryDigest.String(), SDKVersion: f.SDKVersion,
		HardwareArchitecture: f.HardwareArchitecture, CompatibilityString: f.CompatibilityString, DriverVersion: f.DriverVersion, ORTVersion: ort}
}

// proven tells whether a load check's result is for good. A worker that crashed may have lacked memory for a moment.
func proven(r compilers.CheckResult) bool { return r.Outcome != compilers.Failed || r.Code != crashed }

// crashed is the code of a check whose process crashed.
const crashed = -1

// always: what is found out is known for good.
func always[T any](T) bool { return true }
