package trial

import (
	"context"
	"slices"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
)

// JudgeOwn judges a compiled model that an application brings. What the model says of itself is not
// enough, because the string may have been edited, or copied from the source model, and no
// execution provider compares it with its bytes. Where the whole of it is here it is loaded in a
// process of its own, and that counts.
func (ts *Trials) JudgeOwn(ctx context.Context, at *request.Attempt, m *epmodel.Model) (
	judge.Judgement, error) {
	a := at.Plan.Against(at.RuntimeName, at.Content)
	said, made := judge.Judgement{Verdict: compilers.Optimal, At: ts.Now(), Runtime: a.Runtime}, false
	infos := m.CompatibilityInfo()
	for i, ep := range a.EPs {
		if !slices.ContainsFunc(m.Contexts, func(n epmodel.Context) bool { return n.Source == ep.Name }) {
			continue // a string about an execution provider that made no node is about something else
		}
		made = true
		verdict, err := ts.Judges.Verdict(ctx, a.Target(), i, infos[ep.Name])
		if runtimes.Unsettled(ctx, err) {
			return said, err
		}
		if err != nil {
			verdict = compilers.Unknown // it has no word for this
		}
		if judge.Badness(verdict) > judge.Badness(said.Verdict) {
			said.Verdict = verdict
		}
	}
	if !made {
		return judge.Judgement{Verdict: compilers.Unsupported, At: said.At, Runtime: a.Runtime,
			Reason: "it does not load, because the request names only execution providers " +
				"that made no node of it"}, nil
	}
	if len(m.Sidecars()) > 0 {
		said.Reason = ofString(said) +
			"; whether it loads is not known, because only what is adopted is loaded with its context files"
		said.Verdict = compilers.Unknown
		return said, nil
	}
	checked, err := ts.checkOwn(ctx, at.Request, a)
	if runtimes.Unsettled(ctx, err) {
		return said, err
	}
	said.Source = judge.SourceLoadCheck
	switch {
	case err != nil:
		said.Source, said.Verdict = "", compilers.Unknown
		said.Reason = "whether it loads could not be tried: " + err.Error()
	case checked.Outcome == compilers.Failed:
		said.Verdict, said.Reason = compilers.Unsupported, "it does not load: "+checked.Text
	case checked.Outcome != compilers.Passed:
		said.Source = ""
		said.Reason = ofString(said) + "; whether it loads cannot be tried on this machine"
		said.Verdict = compilers.Unknown
	case said.Verdict == compilers.Optimal:
		said.Reason = "it loads, and its compatibility string is the execution provider's"
	default:
		said.Reason = "it loads, though " + ofString(said)
		said.Verdict = compilers.PreferRecompilation
	}
	return said, nil
}

// ofString says what the execution provider thinks of a model's own compatibility string.
func ofString(j judge.Judgement) string {
	if j.Verdict == compilers.Unknown {
		return "its execution provider gives no verdict on its compatibility string"
	}
	return "its compatibility string is " + j.Verdict.String() + " for this runtime"
}

// checkOwn loads a private copy of the caller's compiled model, once for its bytes and the runtime.
func (ts *Trials) checkOwn(ctx context.Context, r *request.Request, a *request.Against) (
	compilers.CheckResult, error) {
	key := ts.Judges.Key(a.Target(), "own", append(a.Canonical.Model[:], a.Spelled()...))
	check := func(ctx context.Context, graph string) (compilers.CheckResult, error) {
		return ts.Check(ctx, a, a.CheckJob(graph, request.LoadLevel("")))
	}
	return workspace.Remember(ctx, ts.Workspaces, r, key, Proven,
		workspace.OnCopy(ts.Workspaces, a.Canonical, check))
}
