package cache

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/views"
)

// compiled is what a flight brings: a build in the store, or, where nothing is to be kept, a view of its own.
type compiled struct {
	build *index.Build
	alone *views.View // nil when the build is in the store
	why   string      // it is not, where that is not what was asked for
	found bool        // it was there already
	fact  any         // of an inquiry: what was found out, and nothing else
}

// compileOnce compiles the model, or waits for whoever does, and answers with a lease on the result.
func (c *Cache) compileOnce(ctx context.Context, r *Request, id modelIdentity, p *plan, rc *runtimeContent, why string, t *telling, phase func(string)) (*Answer, error) {
	var result *compiled
	var first bool
	var err error
	for range maxHandOvers {
		key, scope := c.flightKey(r, id, p)
		if own := (flightKey{build: key.build, scope: rights.OwnScope(r.Peer)}); r.OnMiss == Wait && scope != "" && c.flights.has(own) {
			key, scope = own, own.scope // an application of the same user's holds the claim
		}
		result, first, err = c.flights.join(ctx, key, c.asking(r, t), c.begin(r, id, p, rc, scope))
		if err == nil && !first && r.otherORT(rc, result.build.ORTVersion) {
			c.attend.taken(result.build.ID) // or rather, not taken
			err = errOtherORT(r, result.build)
			continue
		}
		var end *claimEnd
		if !errors.As(err, &end) {
			break // else what was claimed is compiled here after all
		}
		why = end.Error()
	}
	if err != nil {
		return nil, flightError(ctx, r, err)
	}
	if !first && result.build.Put {
		return c.waited(ctx, r, p, result, phase)
	}
	defer c.attend.taken(result.build.ID)
	a, err := c.serveCompiled(ctx, result, phase)
	if errors.Is(err, errGone) {
		r.unserved = append(r.unserved, result.build.ID)
	}
	if err != nil {
		return nil, unservable(err, r.Name, "compiled")
	}
	a.Outcome, a.Why = Waited, "compiled by another request for the same"
	if first && !result.found {
		a.Outcome, a.Why = Compiled, why
	}
	if result.why != "" {
		a.Why = result.why
	}
	return a, nil
}

// errOtherORT is for who waited for a build, time and again, and may not have what came.
func errOtherORT(r *Request, b *index.Build) error {
	return apierr.New(apierr.Busy, nil, "model %q: strict_ort: it is being compiled under ONNX Runtime %s", r.Name, b.ORTVersion).WithHint("ask again")
}

// flightError is what a request is told of a flight that brought nothing.
func flightError(ctx context.Context, r *Request, err error) error {
	var known *apierr.Error
	var end *claimEnd
	switch {
	case ctx.Err() != nil:
		return contextError(ctx, r)
	case errors.As(err, &end):
		return claimFailed(r.Name, end)
	case errors.As(err, &known) && failure.In(known) != nil:
		return failure.Retold(known, r.Name)
	case known != nil:
		return err
	}
	return apierr.New(apierr.Cancelled, err, "model %q", r.Name)
}

func (c *Cache) serveCompiled(ctx context.Context, result *compiled, phase func(string)) (*Answer, error) {
	if result.alone == nil {
		return c.serve(ctx, result.build, phase)
	}
	a, err := leased(result.build, result.alone)
	if err == nil {
		a.Unkept = true
	}
	return a, err
}

// meanwhile is the job of a request whose build was stored after it had been looked for, and before anybody could wait
// for it: there is nothing left to do.
type meanwhile struct {
	result *compiled
	about  jobFacts
}

func (m *meanwhile) facts() jobFacts { return m.about }

func (m *meanwhile) run(context.Context, *flight) (*compiled, error) {
	return m.result, nil
}

// madeMeanwhile looks once more for the build that a job in this scope would make, nil if it is still to be made. Jobs
// store their builds before they are taken from those that can be joined, so under flights.mu nothing is overlooked.
func (c *Cache) madeMeanwhile(r *Request, p *plan, rc *runtimeContent, scope string) *meanwhile {
	if r.OnMiss == Refresh || r.OnMiss == Bypass || scope == "" {
		return nil
	}
	if rc == nil {
		rc = statedRuntime(r)
	}
	for b, err := range c.stored(p, []string{scope}) {
		if err != nil {
			return nil // whoever makes it will say so
		}
		if p.exactly(b) && !slices.Contains(r.unserved, b.ID) && c.barred(r, rc, b) == "" {
			return &meanwhile{result: &compiled{build: b, found: true}, about: p.job(r, scope, "asked for")}
		}
	}
	return nil
}
