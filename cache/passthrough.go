package cache

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/trial"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/unixsock/wire"
)

// answerCompiled answers for a model that has EPContext nodes already.
func (c *Cache) answerCompiled(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	why := at.TooLarge
	if at.Adopts() {
		a, said, err := c.adopt(ctx, at)
		if a != nil || err != nil {
			return a, err
		}
		why = said
	}
	a, err := c.passThrough(ctx, at)
	switch {
	case err != nil:
		return nil, err
	case why != "":
		why = strings.TrimPrefix(why, fmt.Sprintf("model %q: ", at.Name))
		a.Warnings = append(a.Warnings, "not adopted: "+why)
	case at.Adopt && at.OnMiss != request.Bypass:
		a.Why += "; it would be adopted"
	}
	if at.OnMiss == request.Explain {
		return explainPassThrough(a), nil
	}
	return a, nil
}

// explainPassThrough explains the answer to a model that is compiled already.
func explainPassThrough(a *request.Answer) *request.Answer {
	reason := strings.TrimPrefix(a.Why, compiledAlready)
	e := &wire.Explanation{Decision: request.PassThrough, Reason: reason, Runtime: a.Runtime}
	if a.Compatibility.Reason != "" {
		e.Reason += "; " + a.Compatibility.Reason
	}
	e.Reason = wire.Valid(e.Reason)
	a.Outcome, a.Explanation = request.Explained, e
	return a
}

// compiledAlready begins the reason why a model is passed through.
const compiledAlready = "the model is compiled already: "

// passThrough answers for a model that has EPContext nodes already: it is never compiled again. What it says of
// itself is judged for the caller's runtime, and the application loads its own file.
func (c *Cache) passThrough(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	m, err := at.Request.ModelFiles(0).Read(ctx)
	if err != nil {
		return nil, err
	}
	compilers.NameSources(m)
	var sources []string
	for _, n := range m.Contexts {
		if !slices.Contains(sources, n.Source) {
			sources = append(sources, n.Source)
		}
	}
	a := &request.Answer{Outcome: request.PassThrough, ModelDigest: at.Identity.Digest, Runtime: at.RuntimeName, Compatibility: judge.Judgement{Runtime: at.RuntimeName},
		Why: compiledAlready + madeOf(len(m.Contexts), sources)}
	if at, err = c.planner.Planned(ctx, at); err != nil {
		return nil, err
	}
	if a.Compatibility, err = c.judgeOwn(ctx, at, m); err != nil {
		return nil, request.WorkerError(err, "model %q", at.Name)
	}
	for _, s := range sources {
		if !slices.ContainsFunc(at.EPs, func(ep identity.EP) bool { return ep.Name == s }) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("made by %q, which the request does not name: it will not load with these execution providers", s))
		}
	}
	return a, nil
}

// madeOf says what makes a model a compiled one.
func madeOf(nodes int, sources []string) string {
	if nodes == 1 {
		return "it has one EPContext node, made by " + sources[0]
	}
	return fmt.Sprintf("it has %d EPContext nodes, made by %s", nodes, strings.Join(sources, ", "))
}

// judgeOwn judges a compiled model that an application brings. What the model says of itself is not enough: the string
// may have been edited, or copied from the source model, and no execution provider compares it with its bytes. Where
// the whole of it is here it is loaded in a process of its own, and that counts.
func (c *Cache) judgeOwn(ctx context.Context, at *request.Attempt, m *epmodel.Model) (judge.Judgement, error) {
	a := at.Plan.Against(at.RuntimeName, at.Content)
	said, made := judge.Judgement{Verdict: compilers.Optimal, At: c.now(), Runtime: a.Runtime}, false
	infos := m.CompatibilityInfo()
	for i, ep := range a.EPs {
		if !slices.ContainsFunc(m.Contexts, func(n epmodel.Context) bool { return n.Source == ep.Name }) {
			continue // a string about an execution provider that made no node is about something else
		}
		made = true
		verdict, err := c.judges.Verdict(ctx, a.Target(), i, infos[ep.Name])
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
	checked, err := c.checkOwn(ctx, at.Request, a)
	if runtimes.Unsettled(ctx, err) {
		return said, err
	}
	said.Source = judge.SourceLoadCheck
	switch {
	case err != nil:
		said.Source, said.Verdict, said.Reason = "", compilers.Unknown, "whether it loads could not be tried: "+err.Error()
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
func (c *Cache) checkOwn(ctx context.Context, r *request.Request, a *request.Against) (compilers.CheckResult, error) {
	key := c.judges.Key(a.Target(), "own", append(a.Canonical.Model[:], a.Spelled()...))
	check := func(ctx context.Context, graph string) (compilers.CheckResult, error) {
		return c.trials.Check(ctx, a, a.CheckJob(graph, request.LoadLevel("")))
	}
	return workspace.Remember(ctx, c.workspaces, r, key, trial.Proven, workspace.OnCopy(c.workspaces, a.Canonical, check))
}
