package loadcheck

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/ttlcache"
)

// Examine finds out whether a reported build is sound: it verifies the bytes, and then loads the
// build with the reporter's runtime if the daemon may load that.
func (ts *Checker) Examine(ctx context.Context, p request.Peer, from runtimes.Ref, b *index.Build) (
	reports.Examined, error) {
	err := ts.verifyBytes(ctx, b)
	if ctx.Err() != nil {
		return reports.Examined{}, ctx.Err()
	}
	if err != nil {
		text := ts.Store.WithholdDamaged(ctx, b, err)
		return reports.Examined{Verdict: reports.Damaged, Text: text}, nil
	}
	at, err := ts.planReported(ctx, p, from, b)
	if ctx.Err() != nil {
		return reports.Examined{}, ctx.Err()
	}
	if errors.Is(err, errDeviceAbsent) {
		return reports.Examined{Verdict: reports.DeviceAbsent, Text: err.Error()}, nil
	}
	if err != nil {
		return reports.Examined{Text: "it could not be tested with your runtime: " +
			"" + err.Error()}, nil
	}
	a := at.Plan.JudgeTarget(at.RuntimeName, at.Content)
	out := reports.Examined{Runtime: a.Runtime, MadeForIt: at.Plan.MadeExactly(b),
		Record: func(text string) { ts.recordNotLoading(a, b, text) }}
	t, err := ts.loadReported(ctx, a, b)
	switch {
	case ctx.Err() != nil:
		return reports.Examined{}, ctx.Err()
	case err != nil:
		out.Text = "it could not be tested here: " + err.Error()
	case t.Outcome == compilers.Passed:
		out.Verdict, out.Level = reports.Loads, t.GraphOptimizationLevel
		out.Text = "it loads here, in a process of its own, with " + at.RuntimeName
	case t.Outcome == compilers.NotCheckable:
		out.Text = "loading it cannot be tested on this machine, which lacks its device"
		if t.Recorded() == compilers.Failed {
			out.Text += "; without it, it fails: " + compilers.LastWords(t.Text)
		}
	case t.Control != "":
		out.Text = "it does not load here, but neither does a sound build: " +
			compilers.LastWords(t.Control)
	default:
		out.Verdict = reports.DoesNotLoad
		out.Text = "it does not load here either: " + identity.Truncated(t.Text)
	}
	return out, nil
}

// verifyBytes hashes the build's files even if their stamps are unchanged.
func (ts *Checker) verifyBytes(ctx context.Context, b *index.Build) error {
	_, err := ttlcache.Do(ctx, ts.Results, "bytes-"+b.ID.String(),
		func(ctx context.Context) (bool, error) {
			if b.Layer != "" {
				return true, ts.Store.Layers.Hash(ctx, b)
			}
			for _, f := range b.Files {
				if err := ts.Store.Packing().Check(ctx, f.Digest); err != nil {
					return false, fmt.Errorf("%s: %w", f.Name, err)
				}
			}
			return true, nil
		})
	return err
}

var errDeviceAbsent = errors.New("its device is not in this machine")

// planReported plans the build's request for the runtime that the reporter used.
func (ts *Checker) planReported(ctx context.Context, p request.Peer, from runtimes.Ref,
	b *index.Build) (*request.Attempt, error) {
	again, err := workspace.AttemptOf(b)
	if err != nil {
		return nil, err
	}
	rt, rc, err := ts.runtimeReported(ctx, b,
		&request.Request{Peer: p, CompileTerms: identity.CompileTerms{EPs: again.EPs},
			Runtime: from})
	if err != nil {
		return nil, err
	}
	facts, err := ts.Runtimes.Devices(ctx, runtimes.Asker{}, rc, false)
	if err != nil {
		return nil, err
	}
	for _, probe := range facts.EPs {
		for _, ep := range again.EPs {
			if probe.Name != ep.Name || probe.Error != "" {
				continue
			}
			if _, err := runtimes.ResolveDevices(facts, ep); err != nil {
				return nil, fmt.Errorf("%w: %w", errDeviceAbsent, err)
			}
		}
	}
	return ts.Planner.WithPlan(ctx, again.WithRuntime(rt.Name, rc))
}

// runtimeReported returns the runtime that the report names, if the daemon knows it. Reports name
// libraries by path; paths of other users are not looked up, and execution providers inside ONNX
// Runtime are not named. Without a name it returns a runtime with the libraries that made the
// build.
func (ts *Checker) runtimeReported(ctx context.Context, b *index.Build, req *request.Request) (
	*runtimes.Runtime, *runtimes.Content, error) {
	named := req.Runtime.Directory != "" || len(req.Runtime.EPLibraries) > 0
	if named {
		rt, rc, err := ts.Runtimes.Resolve(ctx, req.RuntimeWanted(), func(string) {})
		if err == nil || ctx.Err() != nil {
			return rt, rc, err
		}
	}
	for _, rt := range ts.Runtimes.All() {
		rc, err := ts.Runtimes.Content(ctx, rt, func(string) {})
		if err == nil && rc.HasEvery(b) && rc.MadeBuild(b) {
			return rt, rc, nil
		}
	}
	if named || b.Put { // the libraries of a build that an application put may not exist here
		return nil, nil, errors.New("it is unknown here, and the build is its own")
	}
	return ts.Runtimes.Resolve(ctx, req.RuntimeWanted(), func(string) {})
}

// recordNotLoading remembers that a build of another library does not load with the runtime, which
// overrides earlier judgements.
func (ts *Checker) recordNotLoading(a *request.JudgeTarget, b *index.Build, text string) {
	j := ts.Judges.RecordNotLoading(a.Target(), b, text)
	ts.Store.RecordEvent(event.Of(b, event.Judged, "%s for %s: %s", j.Verdict, a.Runtime, text))
}

// JudgeCompiled judges a compiled model that an application brings. The model's own metadata is not
// enough, because its compatibility string may have been edited, or copied from the source model,
// and no execution provider compares it with the bytes. Therefore a complete model is loaded in a
// worker, and that result counts.
func (ts *Checker) JudgeCompiled(ctx context.Context, at *request.Attempt, m *epmodel.Model) (
	judge.Judgement, error) {
	a := at.Plan.JudgeTarget(at.RuntimeName, at.Content)
	said, made := judge.Judgement{Verdict: compilers.Optimal, At: ts.Now(), Runtime: a.Runtime},
		false
	infos := m.CompatibilityInfo()
	for i, ep := range a.EPs {
		if !slices.ContainsFunc(m.Contexts, func(n epmodel.Context) bool {
			return n.Source == ep.Name
		}) {
			// a string of an execution provider without a node in this model does not concern it
			continue
		}
		made = true
		verdict, err := ts.Judges.Verdict(ctx, a.Target(), i, infos[ep.Name])
		if runtimes.IsTransient(ctx, err) {
			return said, err
		}
		if err != nil {
			verdict = compilers.Unknown // the provider has no verdict
		}
		if judge.Rank(verdict) > judge.Rank(said.Verdict) {
			said.Verdict = verdict
		}
	}
	if !made {
		return judge.Judgement{Verdict: compilers.Unsupported, At: said.At, Runtime: a.Runtime,
			Reason: "it does not load, because the request names no execution provider that " +
				"compiled it"}, nil
	}
	if len(m.Sidecars()) > 0 {
		said.Reason = compatibilityVerdict(said) +
			"; whether it loads is unknown, because only adopted models are loaded with their " +
			"context files"
		said.Verdict = compilers.Unknown
		return said, nil
	}
	checked, err := ts.loadPrivateCopy(ctx, at.Request, a)
	if runtimes.IsTransient(ctx, err) {
		return said, err
	}
	said.Source = judge.SourceLoadCheck
	switch {
	case err != nil:
		said.Source, said.Verdict = "", compilers.Unknown
		said.Reason = "loading it could not be tested: " + err.Error()
	case checked.Outcome == compilers.Failed:
		said.Verdict, said.Reason = compilers.Unsupported, "it does not load: "+checked.Text
	case checked.Outcome != compilers.Passed:
		said.Source = ""
		said.Reason = compatibilityVerdict(said) + "; loading it cannot be tested on this machine"
		said.Verdict = compilers.Unknown
	case said.Verdict == compilers.Optimal:
		said.Reason = "it loads, and its compatibility string is the execution provider's"
	default:
		said.Reason = "it loads, though " + compatibilityVerdict(said)
		said.Verdict = compilers.PreferRecompilation
	}
	return said, nil
}

// compatibilityVerdict returns the execution provider's verdict on the model's compatibility string
// as text.
func compatibilityVerdict(j judge.Judgement) string {
	if j.Verdict == compilers.Unknown {
		return "its execution provider gives no verdict on its compatibility string"
	}
	return "its compatibility string is " + j.Verdict.String() + " for this runtime"
}

// loadPrivateCopy loads a private copy of a compiled model, and remembers the result for its bytes
// and the runtime.
func (ts *Checker) loadPrivateCopy(ctx context.Context, r *request.Request,
	a *request.JudgeTarget) (
	compilers.CheckResult, error) {
	key := ts.Judges.Key(a.Target(), "own", append(a.Canonical.Model[:], a.Encoded()...))
	check := func(ctx context.Context, graph string) (compilers.CheckResult, error) {
		return ts.Check(ctx, a, a.CheckJob(graph, request.LoadLevel("")))
	}
	return workspace.Remember(ctx, ts.Workspaces, r, key, IsFinal,
		workspace.WithCopy(ts.Workspaces, a.Canonical, check))
}
