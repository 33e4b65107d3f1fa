package answer

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/unixsock/wire"
)

// AnswerCompiled answers a request whose model has EPContext nodes already.
func (c *Answerer) AnswerCompiled(ctx context.Context,
	at *request.Attempt) (*request.Answer, error) {
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

// explainPassThrough turns the answer for a compiled model into an explanation.
func explainPassThrough(a *request.Answer) *request.Answer {
	reason := strings.TrimPrefix(a.Why, compiledPrefix)
	e := &wire.Explanation{Decision: request.PassThrough, Reason: reason, Runtime: a.Runtime}
	if a.Compatibility.Reason != "" {
		e.Reason += "; " + a.Compatibility.Reason
	}
	e.Reason = wire.Valid(e.Reason)
	a.Outcome, a.Explanation = request.Explained, e
	return a
}

// compiledPrefix begins the reason why a model is passed through.
const compiledPrefix = "the model is compiled already: "

// passThrough judges the model for the caller's runtime. The application then loads its own file.
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
		Runtime: at.RuntimeName, Why: compiledPrefix + compiledBecause(len(m.Contexts), sources)}
	if at, err = c.Planner.WithPlan(ctx, at); err != nil {
		return nil, err
	}
	if a.Compatibility, err = c.LoadChecker.JudgeCompiled(ctx, at, m); err != nil {
		return nil, request.WorkerError(err, "model %q", at.Name)
	}
	for _, s := range sources {
		if !slices.ContainsFunc(at.EPs, func(ep identity.EP) bool { return ep.Name == s }) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("compiled by %q, which the request does "+
				"not name: it does not load with these execution providers", s))
		}
	}
	return a, nil
}

// compiledBecause returns why a model counts as compiled.
func compiledBecause(nodes int, sources []string) string {
	if nodes == 1 {
		return "it has one EPContext node, made by " + sources[0]
	}
	return fmt.Sprintf("it has %d EPContext nodes, made by %s", nodes, strings.Join(sources, ", "))
}

// WhyTooLarge returns which limit the files of a put exceed, "" if they exceed none. If they exceed
// one, the model is passed through and its files are not read, because hashing them would delay the
// application.
func WhyTooLarge(most int64, r *request.Request) (why string, err error) {
	if !r.Adopt || len(r.Group) > 0 {
		return "", nil
	}
	var total int64
	for _, f := range r.AllFiles() {
		info, err := f.Stat()
		if err != nil {
			return "", apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
		}
		total += info.Size()
	}
	if total > most {
		why = fmt.Sprintf("its files have %s; a submitted build may have at most %s",
			bytesize.Text(total), bytesize.Text(most))
	}
	return why, nil
}

// adopt answers a request to adopt a compiled model: with the stored build of it, or with one that
// is made from the user's files. These are checked like the files of a put, because they are not
// trusted. If a is nil, the model is passed through, and why says why it was not adopted. why is ""
// if the request adopts nothing.
func (c *Answerer) adopt(ctx context.Context, at *request.Attempt) (
	a *request.Answer, why string, err error) {
	m, err := at.Request.ModelFiles(0).Read(ctx)
	if err != nil {
		return nil, "", err
	}
	names, err := m.ArtefactFiles()
	if err != nil {
		return nil, err.Error(), nil
	}
	own := *at.Request
	own.Embed, own.External = isEmbedded(m), make(map[string]*os.File, len(names))
	for _, name := range names {
		own.External[name] = at.External[name] // but no other file that the user sent
	}
	if at, err = c.Planner.WithPlan(ctx, at.AsAdoption(&own)); err != nil {
		return nil, "", err
	}
	switch at.OnMiss {
	case request.KeyOnly:
		return at.Answer(request.Key), "", nil
	case request.Explain:
		a, err := c.Explain(ctx, at)
		if err == nil && a.Explanation.Decision == query.Miss {
			return nil, "", nil
		}
		return a, "", err
	}
	if at.OnMiss != request.Refresh && at.OnMiss != request.Bypass {
		found, err := c.Lookup.Find(ctx, at)
		if found.Answer != nil || err != nil {
			return c.Lookup.FillAnswer(found.Answer, at), "", err
		}
		if found.Stale {
			return nil, found.Why, nil
		}
		if at.OnMiss != request.Fail {
			c.Store.Index().Counters.Add("misses", 1)
		}
	}
	if at.OnMiss == request.Fail || at.OnMiss == request.Bypass {
		return nil, "", nil
	}
	done, why, err := c.Claims.Adopt(ctx, at)
	if done == nil {
		return nil, why, err
	}
	defer done()
	found, err := c.Lookup.Find(ctx, at) // so that this answer is the next request's too
	if err != nil {
		return nil, "", err
	}
	if found.Answer == nil {
		return nil, "it is stored, and not served here: " + found.Why, nil
	}
	a = c.Lookup.FillAnswer(found.Answer, at)
	a.Outcome, a.Why = request.Adopted, "your compiled model is now stored"
	return a, "", nil
}

// isEmbedded reports whether an artefact has its context inside the graph.
func isEmbedded(m *epmodel.Model) bool {
	for i := range m.Contexts {
		if n := &m.Contexts[i]; n.MainContext == 1 {
			return n.EmbedMode == 1
		}
	}
	return false
}
