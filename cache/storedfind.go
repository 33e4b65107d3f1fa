package cache

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/requests"
)

// finding is one look at a store's builds for a request, and why nothing came of it so far.
type finding struct {
	s     *Stored
	build string     // how the build's key begins
	with  *libraries // nil: not known

	asked  *requests.Record // the request
	why    string           // no build fits
	passed error            // why the first that fits is not served; nil: none was passed over
	notes  []string         // one for each that was passed over
}

// builds serves the first sound build of those that were made for wanted, which is the request, or what it is as one for a group's model.
// Without an answer and an error there is none.
func (f *finding) builds(ctx context.Context, r *Request, wanted *requests.Record) (*Answer, error) {
	fitting := f.fitting(wanted)
	if len(fitting) == 0 {
		return nil, nil
	}
	options, err := f.with.options(r)
	if err != nil {
		return nil, err
	}
	own := slices.DeleteFunc(slices.Clone(fitting), func(b *index.Build) bool { return !f.with.made(b) })
	others := slices.DeleteFunc(fitting, f.with.made)
	for _, lot := range [][]*index.Build{own, others} {
		if several(lot) {
			return nil, f.ambiguous(r, lot)
		}
		for _, b := range lot {
			a := f.answer(r, wanted, b, options)
			view, err := f.s.files.View(ctx, b)
			if view != nil {
				a.takeView(view)
			}
			if err == nil {
				return a, nil
			}
			if ctx.Err() != nil {
				return nil, contextError(ctx, r)
			}
			f.pass(b, err)
		}
	}
	return nil, nil
}

// fitting lists the builds that were made for wanted, the newest first.
func (f *finding) fitting(wanted *requests.Record) (fitting []*index.Build) {
	for i := range f.s.snapshot.Builds {
		b := &f.s.snapshot.Builds[i]
		if !wanted.OfModel(b) || !f.s.mayUse(b) || !strings.HasPrefix(b.BuildKey.String(), f.build) {
			continue
		}
		if state := f.s.snapshot.StateOf(b.ID); state.Name != index.Current {
			f.why = fmt.Sprintf("the build of %s is %s: %s", b.Created.Format(time.RFC3339), state.Name, state.Reason)
			continue
		}
		if !wanted.Covers(b) {
			f.why = "the model was compiled for other requests only"
			continue
		}
		if why := ofAnotherMachine(b); why != "" {
			f.pass(b, refusal.New(refusal.NotFound, nil, "build %.12s: %s", b.BuildKey.String(), why).
				WithHint("a daemon runs it once before it serves it: the same without --state"))
			continue
		}
		fitting = append(fitting, b)
	}
	slices.SortStableFunc(fitting, func(a, b *index.Build) int { return b.Created.Compare(a.Created) })
	return fitting
}

// ofAnotherMachine says why a build may load here and fail when it is run: its execution provider
// states no hardware, and the processor that it was made on is of another class, or not known.
func ofAnotherMachine(b *index.Build) string {
	for i := range b.EPs {
		ep := &b.EPs[i]
		made, here := ep.HardwareArchitecture, compilers.ProcessorClass()
		info, _ := compilers.EPByName(ep.Name)
		absent := func(device string) bool {
			return info.TargetAbsent != "" && strings.HasPrefix(device, info.TargetAbsent+" ")
		}
		switch {
		case ep.TookNone, slices.ContainsFunc(ep.Devices, absent):
		case made == "":
			return ep.Name + " states no hardware, and the machine that it was made on is not known"
		case !compilers.IsMachineClass(made) || !strings.Contains(made, "cpu:"):
		case !strings.Contains(made, here):
			return fmt.Sprintf("it was made on a machine of class %s, and this one is %s", made, here)
		}
	}
	return ""
}

// several tells whether there are different builds, among which nobody can choose without running an execution provider.
func several(builds []*index.Build) bool {
	return slices.ContainsFunc(builds, func(b *index.Build) bool { return b.BuildKey != builds[0].BuildKey })
}

// answer says everything of a build but where its files are.
func (f *finding) answer(r *Request, wanted *requests.Record, b *index.Build, options map[string]map[string]string) *Answer {
	a := &Answer{Outcome: Hit, RequestKey: b.RequestKey, ModelDigest: wanted.Model, Record: b.RecordJSON, Build: b,
		Compatibility: storedJudgement(b, f.with), Graph: b.Graph, ProviderOptions: b.ProviderOptions, SessionOptions: b.SessionOptions,
		GraphOptimizationLevel: b.GraphOptimizationLevel, Warnings: slices.Concat(b.Warnings, f.notes)}
	a.Why = a.Compatibility.Reason
	if f.with != nil {
		a.Runtime, a.ProviderOptions = f.with.spec.Directory, options
	}
	if wanted.Member {
		a.Why = ofAGroup + a.Why
		lone := f.asked.OnDevicesOf(b)
		a.RequestKey, _ = lone.Key()
		a.Record = lone.JSON()
	}
	a.tellMembers(r, wanted.Model)
	return a
}

// pass notes that a build that fits is not served.
func (f *finding) pass(b *index.Build, err error) {
	if f.passed == nil {
		f.passed = err
	}
	f.notes = append(f.notes, fmt.Sprintf("the build of %s is passed over: %s", b.Created.Format(time.RFC3339), err))
}

// none says why there is no answer.
func (f *finding) none(r *Request) error {
	if f.passed != nil {
		return f.passed
	}
	return refusal.New(refusal.NotFound, nil, "no build for model %q in %s: %s", r.Name, f.s.dir, f.why).WithHint("a daemon compiles it: the same without --state")
}

// mayUse tells whose builds are read: those for all, this user's own, and those of who made the store. What another user put is
// nobody else's, even where file rights would let one read it.
func (s *Stored) mayUse(b *index.Build) bool {
	return b.Scope == "shared" || b.Scope == OwnScope(Peer{UID: s.uid}) || b.Scope == OwnScope(Peer{UID: s.owner})
}

// ambiguous names the builds that fit.
func (f *finding) ambiguous(r *Request, builds []*index.Build) error {
	if f.passed != nil {
		return f.passed
	}
	seen := make(map[index.BuildKey]bool)
	var lines []string
	for _, b := range builds {
		if !seen[b.BuildKey] {
			seen[b.BuildKey] = true
			lines = append(lines, describe(b))
		}
	}
	return refusal.New(refusal.NotFound, nil, "%d different builds for model %q in %s: %s", len(lines), r.Name, f.s.dir, strings.Join(lines, "; ")).
		WithHint("say which: --build KEY, a device, or --runtime DIR with the libraries that it will be loaded with")
}

// describe says what made a build.
func describe(b *index.Build) string {
	var makers []string
	for _, ep := range b.EPs {
		makers = append(makers, fmt.Sprintf("%s %s, SDK %s, for %s (%s)", ep.Name, ep.Version, ep.SDKVersion, ep.HardwareArchitecture, strings.Join(ep.Devices, ", ")))
	}
	return fmt.Sprintf("%.12s by %s", b.BuildKey.String(), strings.Join(makers, " and "))
}

// storedJudgement judges by what is recorded.
func storedJudgement(b *index.Build, with *libraries) Judgement {
	j := Judgement{Verdict: compilers.Unknown, At: time.Now(), Reason: "no execution provider was asked whether it suits: that takes a daemon"}
	switch {
	case with.made(b):
		j.Verdict, j.Source, j.Reason = compilers.Optimal, sourceLibrary, "the same libraries made it; whether this machine has the device nobody was asked"
	case with != nil:
		j.Reason = "other libraries made it, and none was asked whether it suits: that takes a daemon"
	}
	if with != nil {
		j.Runtime = with.spec.Directory
	}
	return j
}
