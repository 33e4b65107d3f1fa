package cache

import (
	"context"

	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
)

// An application may load with libraries that this daemon does not have, or may not run because
// another user chose them. It can still have what it compiled itself, under a claim, kept and
// served to it again. Such a build is known by what the application shows of its libraries, because
// they are not run here: their bytes, the version of ONNX Runtime that it states, and this machine.
// All of it is in the build key, and only an equal key is a hit, because without the libraries it
// cannot be judged whether another build suits them.

// bringsLibraries reports whether the request can be answered though no runtime here is for it.
func (c *Cache) bringsLibraries(r *request.Request, err error) bool {
	if apierr.ClassOf(err) != apierr.Unavailable || r.Runtime.ORTVersion == "" ||
		len(r.EPs) == 0 || len(r.Group) > 0 {
		return false
	}
	switch r.OnMiss {
	case request.Refresh, request.Bypass:
		return false
	}
	for _, ep := range r.EPs {
		if ref := r.Runtime.Library(ep.Name); ref == nil || ref.File == nil {
			return false
		}
	}
	return c.runtimes.ReplacedPath(r.Wanted()) == "" // else what the caller has open is no whole runtime
}

// answerOwn answers a request for libraries that are the caller's own. missing says why no runtime
// here will do.
func (c *Cache) answerOwn(ctx context.Context, at *request.Attempt, missing error) (
	*request.Answer, error) {
	if at.Identity.Compiled {
		return nil, missing
	}
	p, err := c.planner.Own(ctx, at)
	if err != nil {
		return nil, err
	}
	at = at.WithRuntime(p.EPs[0].Library, nil).WithPlan(p)
	switch at.OnMiss {
	case request.KeyOnly:
		return at.Answer(request.Key), nil
	case request.Explain:
		return c.explainer.Explain(ctx, at)
	}
	found, err := c.lookup.Find(ctx, at)
	if found.Answer != nil || err != nil {
		return c.lookup.Finish(found.Answer, at), err
	}
	if at.Wanted().Shows() || at.OnMiss != request.Wait && at.OnMiss != request.Background {
		c.index.Counters.Add("misses", 1) // else the client asks again, and shows its libraries
	}
	switch {
	case found.Doubted >= reports.MaxRounds:
		return nil, reports.ErrDoubted(at.Name, at.Plan.RequestKey)
	case at.OnMiss == request.Fail:
		return nil, apierr.New(apierr.NotFound, nil, "no build for model %q: %s", at.Name, found.Why).
			WithFact("request_key", p.RequestKey.String()).
			WithHint("compile it: ask again with on_miss claim")
	case at.OnMiss == request.Background:
		return nil, missing // no job of the daemon's can compile it
	case at.OnMiss == request.ForClaim:
		a, err := c.claims.ClaimOrWait(ctx, at, found.Why)
		return c.lookup.Finish(a, at), err
	}
	a, err := c.claims.Await(ctx, at, missing)
	return c.lookup.Finish(a, at), err
}
