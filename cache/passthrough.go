package cache

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
)

// passThrough answers for a model that has EPContext nodes already: it is never compiled again. What it says of
// itself is judged for the caller's runtime, and the application loads its own file.
func (c *Cache) passThrough(ctx context.Context, r *Request, id identity, rt *runtime, rc *runtimeContent) (*Answer, error) {
	src, err := epmodel.FileSource(r.Graph)
	if err != nil {
		return nil, fail(BadModel, err, "model %q", r.Name)
	}
	m, err := epmodel.Read(ctx, r.Name, src)
	if err != nil {
		return nil, modelError(r, err)
	}
	var sources []string
	for _, n := range m.Contexts {
		if !slices.Contains(sources, n.Source) {
			sources = append(sources, n.Source)
		}
	}
	a := &Answer{Outcome: PassThrough, ModelDigest: id.Digest, Runtime: rt.name, Compatibility: Judgement{Runtime: rt.name},
		Why: fmt.Sprintf("the model is compiled already: it has %d EPContext nodes made by %s", len(m.Contexts), strings.Join(sources, ", "))}
	infos := m.CompatibilityInfo()
	worst := compilers.Optimal
	judged := false
	for i, ep := range r.EPs {
		if !slices.Contains(sources, ep.Name) {
			continue
		}
		verdict, err := c.judge(ctx, rc, r.EPs[i], infos[ep.Name])
		if err != nil {
			a.Warnings = append(a.Warnings, fmt.Sprintf("%s was not asked whether it can load this model: %v", ep.Name, err))
			verdict = compilers.Unknown
		}
		judged = true
		worst = worse(worst, verdict)
	}
	for _, s := range sources {
		if !slices.ContainsFunc(r.EPs, func(ep EP) bool { return ep.Name == s }) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("made by %q, which the request does not name: it will not load with these execution providers", s))
		}
	}
	if judged {
		a.Compatibility.Verdict, a.Compatibility.Source = worst, "execution provider"
	}
	return a, nil
}

// worse of two verdicts; not to know is worse than to prefer something else, and better than a refusal.
func worse(a, b compilers.Verdict) compilers.Verdict {
	rank := map[compilers.Verdict]int{compilers.Optimal: 0, compilers.PreferRecompilation: 1, compilers.Unknown: 2, compilers.Unsupported: 3}
	if rank[b] > rank[a] {
		return b
	}
	return a
}

// judge asks the EP itself what it thinks of a compatibility string, once for each distinct string.
func (c *Cache) judge(ctx context.Context, rc *runtimeContent, ep EP, info string) (compilers.Verdict, error) {
	if info == "" {
		return compilers.Unknown, nil
	}
	lib, ok := rc.library(ep.Name)
	if !ok {
		return compilers.Unknown, fmt.Errorf("the runtime has no %s", ep.Name)
	}
	key := c.probes.key("verdict", rc, []byte(ep.Name+"\x00"+info))
	return remember(ctx, c.probes, key, false, always, func(ctx context.Context) (compilers.Verdict, error) {
		options, err := fillOptions(ep.Name, ep.Options, lib)
		if err != nil {
			return compilers.Unknown, err
		}
		spec := compilers.EP{Name: ep.Name, Library: lib.Path, Devices: ep.Devices, Options: options}
		verdicts, err := c.compiler.Compatibility(ctx, rc.spec, spec, []string{info})
		if err != nil || len(verdicts) != 1 {
			return compilers.Unknown, err
		}
		return verdicts[0], nil
	})
}
