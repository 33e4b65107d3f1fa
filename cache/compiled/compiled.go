// Package compiled answers requests for models that have EPContext nodes already. They are never
// compiled: they are judged and passed through, or adopted if their user wants that.
package compiled

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/explain"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/trial"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// Answerer answers for compiled models. All fields must be set.
type Answerer struct {
	Planner   *plan.Planner
	Lookup    *lookup.Lookup
	Explainer *explain.Explainer
	Trials    *trial.Trials
	Claims    *claims.Claims
	Index     *index.Index // counts misses
}

// Answer answers for a model that has EPContext nodes already.
func (c *Answerer) Answer(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
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

// passThrough judges the model for the caller's runtime. The application loads its own file.
func (c *Answerer) passThrough(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
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
	a := &request.Answer{Outcome: request.PassThrough, ModelDigest: at.Identity.Digest,
		Runtime: at.RuntimeName, Why: compiledAlready + madeOf(len(m.Contexts), sources)}
	if at, err = c.Planner.Planned(ctx, at); err != nil {
		return nil, err
	}
	if a.Compatibility, err = c.Trials.JudgeOwn(ctx, at, m); err != nil {
		return nil, request.WorkerError(err, "model %q", at.Name)
	}
	for _, s := range sources {
		if !slices.ContainsFunc(at.EPs, func(ep identity.EP) bool { return ep.Name == s }) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("made by %q, which the request does not name: "+
				"it will not load with these execution providers", s))
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
