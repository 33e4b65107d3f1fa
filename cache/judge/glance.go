package judge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// Standing returns how a build suits the registered runtimes: the best of what is known.
func (x *Judge) Standing(b *index.Build) Judgement {
	var best Judgement
	for _, rt := range x.Runtimes.All() {
		rc := rt.Found()
		if rc == nil || !rc.HasEvery(b) {
			continue
		}
		j, ok := x.Verdicts(rc).glance(b, x.generation())
		if !ok && rc.Made(b) {
			j, ok = Judgement{Verdict: compilers.Optimal, Source: SourceLibrary,
				Reason: "made by equal libraries", At: b.Created, Runtime: rt.Name}, true
		}
		if ok && (best.Runtime == "" || Badness(j.Verdict) < Badness(best.Verdict)) {
			best = j
		}
	}
	return best
}

// Glance judges without loading the build. With several execution providers the worst counts.
func (x *Judge) Glance(ctx context.Context, t *Target, b *index.Build) (Judgement, error) {
	var out Judgement
	if len(b.EPs) != len(t.EPs) || len(t.EPs) == 0 {
		return out, fmt.Errorf("build %s is of %d execution providers, not %d", b.ID, len(b.EPs), len(t.EPs))
	}
	for i := range t.EPs {
		j, err := x.GlancePart(ctx, t, i, Part{&b.EPs[i], b.ORTVersion, b.BuildKey == t.BuildKey})
		if err != nil {
			return out, err
		}
		firm := j.Firm && (i == 0 || out.Firm)
		if i == 0 || Badness(j.Verdict) > Badness(out.Verdict) || out.Source == SourceLibrary && j.Verdict == out.Verdict {
			out = j
		}
		out.Firm = firm
	}
	out.At, out.Runtime = x.Now(), t.Runtime
	return out, nil
}

// Part is what one execution provider made of a build.
type Part struct {
	Made *index.EPFacts
	ORT  string // under which version of ONNX Runtime
	Own  bool   // the build has the very key that it is judged for
}

// GlancePart judges what the target's execution provider i would load.
func (x *Judge) GlancePart(ctx context.Context, t *Target, i int, b Part) (Judgement, error) {
	made, now := b.Made, &t.Facts[i]
	if made.TookNone {
		return tookNone(made, now), nil
	}
	set, _ := x.Rules()
	rule := set.Judge(ruleFacts(made, b.ORT), ruleFacts(now, t.Content.Spec.ORTVersion))
	byRule := Judgement{Verdict: rule.Verdict, Source: SourceRule + rule.Rule, Reason: rule.Reason}
	if rule.Rule == "" {
		byRule.Source = ""
	}
	own, equal := t.ownLibrary(i, b)
	if own.Firm {
		return own, nil
	}
	verdict, err := x.Verdict(ctx, t, i, made.CompatibilityString)
	if err != nil {
		if runtimes.Unsettled(ctx, err) {
			return Judgement{}, err
		}
		verdict = compilers.Unknown // an execution provider that cannot say is no reason to give up
	}
	j := byRule
	switch {
	case verdict != compilers.Unknown:
		j = Judgement{Verdict: verdict, Source: SourceEP, Firm: true,
			Reason: fmt.Sprintf("%s %s, asked about what %s made, says %s",
				made.Name, now.Version, makerName(made), verdict)}
	case equal:
		j = own
	case made.CompatibilityString != "" && made.CompatibilityString == now.CompatibilityString:
		j = Judgement{Verdict: compilers.Optimal, Source: SourceFingerprint, Firm: true,
			Reason: fmt.Sprintf("what %s compiles now says the same of itself: %s",
				made.Name, Shown(made.CompatibilityString))}
	}
	if equal && rule.Rule != "" && Badness(rule.Verdict) > Badness(j.Verdict) {
		return byRule, nil // such as one about drivers
	}
	return j, nil
}

// tookNone judges the part of an execution provider that took no node of the model.
func tookNone(made, now *index.EPFacts) Judgement {
	j := Judgement{Verdict: compilers.Optimal, Source: SourceLibrary,
		Reason: made.Name + " took no node of it", Firm: true}
	if made.LibraryDigest != now.LibraryDigest && !made.LibraryDigest.IsZero() {
		j.Verdict = compilers.PreferRecompilation
		j.Reason += "; the library is another one now, which may take some"
	}
	return j
}

// ownLibrary judges what an equal library made, and reports whether one did. It is firm where nothing
// else changed: the driver and, for execution providers that state no hardware, the machine.
func (t *Target) ownLibrary(i int, b Part) (j Judgement, equal bool) {
	made, now := b.Made, &t.Facts[i]
	elsewhere := t.Marks.elsewhere(i, made)
	if !b.Own && (made.LibraryDigest != now.LibraryDigest ||
		made.SDKVersion != now.SDKVersion || made.CompatibilityString != now.CompatibilityString ||
		made.HardwareArchitecture != now.HardwareArchitecture && !elsewhere) {
		return Judgement{}, false
	}
	j = Judgement{Verdict: compilers.Optimal, Source: SourceLibrary,
		Reason: "made by an equal library of " + made.Name, Firm: true}
	if made.DriverVersion != now.DriverVersion {
		j.Firm = false
		j.Reason += fmt.Sprintf(" with driver %s, and this machine has %s",
			cmp.Or(made.DriverVersion, "none"), cmp.Or(now.DriverVersion, "none"))
	}
	switch {
	case elsewhere && made.HardwareArchitecture == "":
		j.Firm = false
		j.Reason += " on a machine that it does not state"
	case elsewhere:
		j.Firm, j.Verdict = false, compilers.PreferRecompilation
		j.Reason += fmt.Sprintf(" on another class of machine, %s", made.HardwareArchitecture)
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

// Shown shortens a compatibility string for people.
func Shown(s string) string {
	const most = 160
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// tried judges a build that was loaded in a process of its own, and was run where it may be of
// another machine. Where the target device is here, that proves whether it loads; that it loads
// does not prove that it is the best there could be.
func (x *Judge) tried(t *Target, b *index.Build, glance Judgement, checked compilers.CheckResult) Judgement {
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
		if !t.Content.Made(b) {
			out.Reason += ", though another library made it: " + MakerNames(b)
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
		out = glance
		if out.Source == "" {
			out.Reason = "no rule tells, and whether it loads cannot be tried on this machine"
		}
		if t.Marks.Elsewhere(b) {
			out.Verdict, out.Source = compilers.Unknown, ""
			out.Reason = "whether it runs on this machine cannot be tried: " + checked.Text
		}
	}
	return out
}

// MakerNames says what made a build, for people.
func MakerNames(b *index.Build) string {
	names := make([]string, len(b.EPs))
	for i := range b.EPs {
		names[i] = b.EPs[i].Name + " " + makerName(&b.EPs[i])
	}
	return strings.Join(names, ", ")
}

// Verdict asks the execution provider itself what it thinks of a compatibility string, once for
// each distinct string.
func (x *Judge) Verdict(ctx context.Context, t *Target, i int, info string) (compilers.Verdict, error) {
	if info == "" {
		return compilers.Unknown, nil
	}
	rc, ep := t.Content, t.EPs[i]
	key := x.Key(t, "verdict", []byte(ep.Name+"\x00"+info))
	ask := func(ctx context.Context) (compilers.Verdict, error) {
		return runtimes.Still(rc, func() (compilers.Verdict, error) {
			verdicts, err := x.Compiler.Compatibility(ctx, rc.Spec, ep, []string{info})
			switch {
			case errors.As(err, new(*compilers.RefusedError)), err == nil && len(verdicts) != 1:
				return compilers.Unknown, nil // it has no word for this: that will not change
			case err != nil:
				return compilers.Unknown, err
			}
			return verdicts[0], nil
		})
	}
	always := func(compilers.Verdict) bool { return true }
	return runtimes.Remember(ctx, x.Runtimes, runtimes.Question{Key: key}, always, ask)
}

func ruleFacts(f *index.EPFacts, ort string) rules.Facts {
	return rules.Facts{EP: f.Name, EPVersion: f.Version, LibraryDigest: f.LibraryDigest.String(),
		SDKVersion: f.SDKVersion, HardwareArchitecture: f.HardwareArchitecture,
		CompatibilityString: f.CompatibilityString, DriverVersion: f.DriverVersion, ORTVersion: ort}
}
