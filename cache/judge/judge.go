// Package judge decides how a build suits a runtime: whether it is optimal, works, or does not load
// there, and from which source that is known.
//
// The sources, from best to worst, are an equal library, the execution provider's own verdict, an
// equal fingerprint, a load check, and the rules of package rules. The package loads no build
// itself: the caller does, through a Check, if that could change a judgement. Verdicts are
// remembered for exactly the libraries and rules under which they were made.
//
// Start reading at Judge.
package judge

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// Judgement says how a build suits a runtime, and from which source that is known.
type Judgement struct {
	Verdict compilers.Verdict
	Source  string // one of those below; "": no source knows
	Reason  string
	At      time.Time
	Runtime string // the runtime's name

	Level string `json:"-"` // the only graph optimisation level at which it loads, "" if any
	// Firm: the verdict is the execution provider's own, or about its own library, so loading the
	// build could not improve on it.
	Firm bool `json:"-"`
}

// The sources of judgements, from best to worst; a rule's name follows its word.
const (
	SourceLibrary     = "same library"
	SourceEP          = "execution provider"
	SourceFingerprint = "fingerprint"
	SourceLoadCheck   = "load check"
	SourcePut         = "put" // the caller compiled it itself
	SourceRule        = "rule "
)

// Rank orders verdicts: 0 is the best. Unknown is between prefer_recompilation and a refusal.
func Rank(v compilers.Verdict) int {
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

// Judge judges builds and remembers verdicts. All fields must be set. It is safe for concurrent
// use.
type Judge struct {
	Runtimes *runtimes.Set
	Compiler compilers.Compiler
	Index    *index.Index
	Now      func() time.Time
	Log      *slog.Logger
	Event    func(index.Event)

	// Rules returns the rules in effect, and their generation. Judgements of other generations do
	// not count.
	Rules func() (*rules.Set, uint64)
	// Verdicts returns the remembered verdicts for a runtime's contents.
	Verdicts func(*runtimes.Content) *Verdicts
	// Target returns the target for which the build's request would be compiled now.
	Target func(context.Context, *runtimes.Runtime, *runtimes.Content,
		*index.Build) (*Target, error)
	// Rebuild has a build compiled again in the background, for the runtime of that name.
	Rebuild func(b *index.Build, runtime, why string)
}

func (x *Judge) generation() uint64 {
	_, generation := x.Rules()
	return generation
}

// Check loads a build if the result could change the judgement. tried reports whether it did.
type Check func(ctx context.Context, glance Judgement) (checked compilers.CheckResult,
	tried bool, err error)

// Build returns how a build suits the target, from the best source that has an answer: an equal
// library, the provider's verdict, the fingerprint, a load check, the rules. The result is
// remembered for the build and the runtime.
func (x *Judge) Build(ctx context.Context, t *Target, b *index.Build,
	check Check) (Judgement, error) {
	under := x.generation() // read first, so that a change during the call is noticed
	verdicts := x.Verdicts(t.Content)
	if j, ok := verdicts.load(b.ID, under); ok {
		return j, nil
	}
	if j, ok := memo.Recall[Judgement](&x.Index.Memos, x.notLoadingKey(t, b)); ok {
		j.Firm = true // not recorded
		verdicts.save(b.ID, j, under)
		return j, nil
	}
	j, err := x.glance(ctx, t, b)
	if err != nil {
		return j, err
	}
	if b.Put {
		// the string was written by the build's maker, so the build is loaded before it is trusted
		j.Firm = false
	}
	checked, tried, err := check(ctx, j)
	if err != nil {
		return j, err
	}
	if tried {
		j = x.judgeLoaded(t, b, j, checked)
	} else {
		j = t.judgeNotLoaded(b, j)
	}
	verdicts.save(b.ID, j, under)
	return j, nil
}

// IsKnown reports whether Build would return a remembered judgement.
func (x *Judge) IsKnown(t *Target, b *index.Build) bool {
	_, known := x.Verdicts(t.Content).load(b.ID, x.generation())
	return known
}

// RecordNotLoading remembers that a build of another library does not load with the runtime, which
// overrides earlier judgements. It returns the new judgement.
func (x *Judge) RecordNotLoading(t *Target, b *index.Build, text string) Judgement {
	j := Judgement{Verdict: compilers.Unsupported, Source: SourceLoadCheck, Reason: text,
		At: x.Now(), Runtime: t.Runtime, Firm: true}
	x.Verdicts(t.Content).save(b.ID, j, x.generation())
	if err := memo.Save(&x.Index.Memos, x.notLoadingKey(t, b), j); err != nil {
		// Best effort: without the record, it is judged and reported again after a restart.
		x.Log.Warn("cannot record a judgement", "build", b.BuildKey.String(), "error", err)
	}
	return j
}

func (x *Judge) notLoadingKey(t *Target, b *index.Build) string {
	return "disproved:" + x.Runtimes.Key("report", t.Content, b.ID[:])
}

// Target is a runtime with the execution providers and options of a request. Builds are judged for
// it.
type Target struct {
	Runtime  string // its name
	Content  *runtimes.Content
	EPs      []compilers.EP
	Marks    Marks
	Facts    []index.EPFacts // of a build compiled for it, in the order of the EPs
	BuildKey index.BuildKey  // of such a build
	Noticed  [32]byte        // Marks.Digest
}

// Key returns the memo key of a judgement. It covers all facts that a probe reads, such as the
// version of the SDK.
func (x *Judge) Key(t *Target, kind string, more []byte) string {
	return x.Runtimes.Key(kind, t.Content, append(t.Noticed[:], more...))
}

// Marks are the fingerprints of a request's execution providers, in their order.
type Marks []compilers.Fingerprint

// Digest returns a digest of the facts that a probe reads about execution providers: SDK, devices
// and metadata, drivers.
func (f Marks) Digest(facts []index.EPFacts) [32]byte {
	all := slices.Clone(f)
	for i := range all {
		all[i].Seconds, all[i].DriverVersion = 0, facts[i].DriverVersion
	}
	raw, err := json.Marshal(all)
	if err != nil {
		return [32]byte{} // cannot happen: strings and numbers can always be marshalled
	}
	return blake3.Sum256(raw)
}

// LaterIR reports whether a later ONNX Runtime wrote the build's graph, in a format that this one
// may not load.
func (f Marks) LaterIR(b *index.Build) bool {
	return len(f) > 0 && f[0].IRVersion != 0 && b.IRVersion > f[0].IRVersion
}

// Doubted returns the judgement of a build that did not load where it was made, because its device
// is not there or because it never does: its verdict is at most Unknown.
func (j Judgement) Doubted(b *index.Build) Judgement {
	if b.LoadCheck == compilers.Failed && Rank(j.Verdict) < Rank(compilers.Unknown) {
		j.Verdict, j.Source = compilers.Unknown, ""
		j.Reason += "; it did not load on the machine that made it, which lacks its device"
	}
	return j
}

// judgeNotLoaded returns the judgement of a build that was not loaded. Its verdict is at most
// Unknown if a fact speaks against the build that only a load could refute.
func (t *Target) judgeNotLoaded(b *index.Build, glance Judgement) Judgement {
	glance = glance.Doubted(b)
	if !t.Marks.LaterIR(b) || Rank(glance.Verdict) >= Rank(compilers.Unknown) {
		return glance
	}
	glance.Verdict, glance.Source = compilers.Unknown, ""
	glance.Reason = fmt.Sprintf("ONNX Runtime %s wrote its graph in IR version %d, and this one "+
		"(%s) writes %d and may refuse later ones; it was not loaded", cmp.Or(b.ORTVersion,
		"of another version"), b.IRVersion, cmp.Or(t.Content.Spec.ORTVersion, "unknown"),
		t.Marks[0].IRVersion)
	return glance
}

// OtherMachine reports whether one of the execution providers may have made its part of the build
// on a machine of another class without stating the hardware. Such a build may load here and then
// fail when it runs.
func (f Marks) OtherMachine(b *index.Build) bool {
	for i := range b.EPs {
		if f.otherMachine(i, &b.EPs[i]) {
			return true
		}
	}
	return false
}

func (f Marks) otherMachine(i int, made *index.EPFacts) bool {
	class, hardware := f[i].MachineClass, made.HardwareArchitecture
	if made.TookNone || class == "" || hardware == class {
		return false
	}
	return hardware == "" || compilers.IsMachineClass(hardware) || f[i].HardwareArchitecture == ""
}

// FillBuild sets the fields of the client's message that say how the build suits the runtime.
func (j Judgement) FillBuild(out *wire.Build) {
	if j.Source != "" || j.Reason != "" { // otherwise it was not judged
		out.Compatibility, out.CompatibilitySource = j.Verdict.String(), j.Source
		out.CompatibilityReason = wire.Valid(j.Reason)
		out.CompatibilityRuntime, out.JudgedMs = j.Runtime, wire.Milliseconds(j.At)
	}
}

// BestKnown returns the best remembered judgement of a build among the registered runtimes.
func (x *Judge) BestKnown(b *index.Build) Judgement {
	var best Judgement
	for _, rt := range x.Runtimes.All() {
		rc := rt.LastContent()
		if rc == nil || !rc.HasEvery(b) {
			continue
		}
		j, ok := x.Verdicts(rc).glance(b, x.generation())
		if !ok && rc.MadeBuild(b) && b.ORTVersion == rc.Spec.ORTVersion {
			j, ok = Judgement{Verdict: compilers.Optimal, Source: SourceLibrary,
				Reason: "compiled by equal libraries", At: b.Created, Runtime: rt.Name}, true
			j = j.Doubted(b)
		}
		if ok && (best.Runtime == "" || Rank(j.Verdict) < Rank(best.Verdict)) {
			best = j
		}
	}
	return best
}

// Glance judges a build without loading it. With several execution providers it returns the worst
// judgement.
func (x *Judge) Glance(ctx context.Context, t *Target, b *index.Build) (Judgement, error) {
	j, err := x.glance(ctx, t, b)
	if err != nil {
		return j, err
	}
	return t.judgeNotLoaded(b, j), nil
}

// glance returns the judgement on which a load check would be based.
func (x *Judge) glance(ctx context.Context, t *Target, b *index.Build) (Judgement, error) {
	var out Judgement
	if len(b.EPs) != len(t.EPs) || len(t.EPs) == 0 {
		return out, fmt.Errorf("build %s is of %d execution providers, not %d", b.ID,
			len(b.EPs), len(t.EPs))
	}
	for i := range t.EPs {
		j, err := x.GlancePart(ctx, t, i, Part{&b.EPs[i], b.ORTVersion, b.BuildKey == t.BuildKey})
		if err != nil {
			return out, err
		}
		firm := j.Firm && (i == 0 || out.Firm)
		if i == 0 || Rank(j.Verdict) > Rank(out.Verdict) || out.Source == SourceLibrary &&
			j.Verdict == out.Verdict {
			out = j
		}
		out.Firm = firm
	}
	out.Firm = out.Firm && !t.Marks.LaterIR(b) && b.LoadCheck != compilers.Failed
	out.At, out.Runtime = x.Now(), t.Runtime
	return out, nil
}

// Part is the part of a build that one execution provider made.
type Part struct {
	Made *index.EPFacts
	ORT  string // the version of ONNX Runtime that made it
	Own  bool   // the build has the target's build key
}

// GlancePart judges the part that the target's execution provider i would load.
func (x *Judge) GlancePart(ctx context.Context, t *Target, i int, b Part) (Judgement, error) {
	made, now := b.Made, &t.Facts[i]
	if made.TookNone {
		return judgeUnused(made, now), nil
	}
	set, _ := x.Rules()
	rule := set.Judge(ruleFacts(made, b.ORT), ruleFacts(now, t.Content.Spec.ORTVersion))
	byRule := Judgement{Verdict: rule.Verdict, Source: SourceRule + rule.Rule, Reason: rule.Reason}
	if rule.Rule == "" {
		byRule.Source = ""
	}
	own, equal := t.sameLibrary(i, b)
	if own.Firm {
		return own, nil
	}
	verdict, err := x.Verdict(ctx, t, i, made.CompatibilityString)
	if err != nil {
		if runtimes.IsTransient(ctx, err) {
			return Judgement{}, err
		}
		verdict = compilers.Unknown // without a verdict, other sources are tried
	}
	j := byRule
	switch {
	case verdict != compilers.Unknown:
		j = Judgement{Verdict: verdict, Source: SourceEP, Firm: true,
			Reason: fmt.Sprintf("%s %s says of a build of %s: %s",
				made.Name, now.Version, makerName(made), verdict)}
	case equal:
		j = own
	case made.CompatibilityString != "" && made.CompatibilityString == now.CompatibilityString:
		j = Judgement{Verdict: compilers.Optimal, Source: SourceFingerprint,
			Firm: made.DriverVersion == now.DriverVersion,
			Reason: fmt.Sprintf("a test compile by %s has the same compatibility string: %s",
				made.Name, ShortCompatibility(made.CompatibilityString))}
	}
	if equal && rule.Rule != "" && Rank(rule.Verdict) > Rank(j.Verdict) {
		return byRule, nil // a rule overrides, for example one about drivers
	}
	return j, nil
}

// judgeUnused judges the part of an execution provider that took no node of the model.
func judgeUnused(made, now *index.EPFacts) Judgement {
	j := Judgement{Verdict: compilers.Optimal, Source: SourceLibrary,
		Reason: made.Name + " took no node of it", Firm: true}
	if made.LibraryDigest != now.LibraryDigest && !made.LibraryDigest.IsZero() {
		j.Verdict = compilers.PreferRecompilation
		j.Reason += "; the library has changed since, and may take some"
	}
	return j
}

// sameLibrary judges the part if an equal library made it, and reports whether one did. The
// judgement is firm unless the driver changed or, for execution providers that state no hardware,
// the machine.
func (t *Target) sameLibrary(i int, b Part) (j Judgement, equal bool) {
	made, now := b.Made, &t.Facts[i]
	elsewhere := t.Marks.otherMachine(i, made)
	if !b.Own && (made.LibraryDigest != now.LibraryDigest ||
		made.SDKVersion != now.SDKVersion || made.CompatibilityString != now.CompatibilityString ||
		made.HardwareArchitecture != now.HardwareArchitecture && !elsewhere) {
		return Judgement{}, false
	}
	j = Judgement{Verdict: compilers.Optimal, Source: SourceLibrary,
		Reason: "compiled by an equal library of " + made.Name, Firm: true}
	if made.DriverVersion != now.DriverVersion {
		j.Firm = false
		j.Reason += fmt.Sprintf(" with driver %s, and this machine has %s",
			cmp.Or(made.DriverVersion, "none"), cmp.Or(now.DriverVersion, "none"))
	}
	switch {
	case elsewhere && made.HardwareArchitecture == "":
		j.Firm = false
		j.Reason += " on an unknown machine"
	case elsewhere:
		j.Firm, j.Verdict = false, compilers.PreferRecompilation
		j.Reason += fmt.Sprintf(" on another class of machine: %s", made.HardwareArchitecture)
	}
	return j, true
}

func makerName(f *index.EPFacts) string {
	if f.LibraryDigest.IsZero() {
		return fmt.Sprintf("an unknown library (SDK %s)", cmp.Or(f.SDKVersion, "unknown"))
	}
	return fmt.Sprintf("%s (SDK %s, library %.12s)", cmp.Or(f.Version, "its library"),
		cmp.Or(f.SDKVersion, "unknown"), f.LibraryDigest)
}

// ShortCompatibility shortens a compatibility string for messages.
func ShortCompatibility(s string) string {
	const most = 160
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// judgeLoaded judges a build by the result of a load check, which also ran the build if it may come
// from another machine. If this machine has the target device, the check proves whether the build
// loads. It never proves that the build is optimal.
func (x *Judge) judgeLoaded(t *Target, b *index.Build, glance Judgement,
	checked compilers.CheckResult) Judgement {
	out := Judgement{At: x.Now(), Runtime: t.Runtime, Source: SourceLoadCheck}
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
		if !t.Content.MadeBuild(b) {
			out.Reason += ", though another library compiled it: " + MakerNames(b)
		}
		if glance.Source == SourceLibrary || glance.Verdict == compilers.Optimal {
			out.Verdict, out.Reason = glance.Verdict, loads+"; "+glance.Reason
		} else if glance.Source != "" {
			out.Reason += "; " + glance.Source + ": " + glance.Reason
		}
		if checked.GraphOptimizationLevel == "disable_all" {
			out.Level = checked.GraphOptimizationLevel
		}
	default:
		out = t.judgeNotLoaded(b, glance)
		switch {
		case t.Marks.OtherMachine(b):
			out.Verdict, out.Source = compilers.Unknown, ""
			out.Reason = "running it cannot be tested on this machine: " + checked.Text
		case (out.Source == SourceLibrary || out.Source == SourceFingerprint) &&
			!store.SameDrivers(b.EPs, t.Facts):
			out.Verdict, out.Source = compilers.Unknown, ""
			out.Reason += "; the driver is another one, and loading it cannot be tested on this " +
				"machine"
		case glance.Source == "":
			out.Reason = "no rule applies, and loading it cannot be tested on this machine"
		}
	}
	return out
}

// MakerNames returns the names of the libraries that made a build, for messages.
func MakerNames(b *index.Build) string {
	names := make([]string, len(b.EPs))
	for i := range b.EPs {
		names[i] = b.EPs[i].Name + " " + makerName(&b.EPs[i])
	}
	return strings.Join(names, ", ")
}

// Verdict asks the execution provider to judge a compatibility string, once for each string.
func (x *Judge) Verdict(ctx context.Context, t *Target, i int,
	info string) (compilers.Verdict, error) {
	if info == "" {
		return compilers.Unknown, nil
	}
	rc, ep := t.Content, t.EPs[i]
	key := x.Key(t, "verdict", []byte(ep.Name+"\x00"+info))
	ask := func(ctx context.Context) (compilers.Verdict, error) {
		return runtimes.RunUnreplaced(rc, func() (compilers.Verdict, error) {
			verdicts, err := x.Compiler.Compatibility(ctx, rc.Spec, ep, []string{info})
			switch {
			case errors.As(err, new(*compilers.RefusedError)), err == nil && len(verdicts) != 1:
				// remembered, because the provider will never have a verdict
				return compilers.Unknown, nil
			case err != nil:
				return compilers.Unknown, err
			}
			return verdicts[0], nil
		})
	}
	always := func(compilers.Verdict) bool { return true }
	return runtimes.Remember(ctx, x.Runtimes, runtimes.Inquiry{Key: key}, always, ask)
}

func ruleFacts(f *index.EPFacts, ort string) rules.Facts {
	return rules.Facts{EP: f.Name, EPVersion: f.Version, LibraryDigest: f.LibraryDigest.String(),
		SDKVersion: f.SDKVersion, HardwareArchitecture: f.HardwareArchitecture,
		CompatibilityString: f.CompatibilityString, DriverVersion: f.DriverVersion, ORTVersion: ort}
}
