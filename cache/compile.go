package cache

import (
	"context"
	"errors"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
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
func (c *Cache) compileOnce(ctx context.Context, at *attempt, why string) (*Answer, error) {
	var result *compiled
	var first bool
	var err error
	for range maxHandOvers {
		key, scope := at.flightKey()
		if own := (flightKey{build: key.build, scope: rights.OwnScope(at.Peer)}); at.OnMiss == Wait && scope != "" && c.flights.has(own) {
			key, scope = own, own.scope // an application of the same user's holds the claim
		}
		result, first, err = c.flights.join(ctx, key, c.asking(at), c.begin(at, scope))
		if err == nil && !first && at.otherORT(result.build.ORTVersion) {
			c.store.Taken(result.build.ID) // or rather, not taken
			err = errOtherORT(at, result.build)
			continue
		}
		var end *claimEnd
		if !errors.As(err, &end) {
			break // else what was claimed is compiled here after all
		}
		why = end.Error()
	}
	if err != nil {
		return nil, flightError(ctx, at.Name, err)
	}
	if !first && result.build.Put {
		return c.waited(ctx, at, result)
	}
	defer c.store.Taken(result.build.ID)
	a, err := c.serveCompiled(ctx, result, at.phase)
	if errors.Is(err, store.ErrGone) {
		at.unserved.add(result.build.ID)
	}
	if err != nil {
		return nil, unservable(err, at.Name, "compiled")
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
func errOtherORT(at *attempt, b *index.Build) error {
	return apierr.New(apierr.Busy, nil, "model %q: strict_ort: it is being compiled under ONNX Runtime %s", at.Name, b.ORTVersion).WithHint("ask again")
}

// flightError is what a request is told of a flight that brought nothing.
func flightError(ctx context.Context, model string, err error) error {
	var known *apierr.Error
	var end *claimEnd
	switch {
	case ctx.Err() != nil:
		return contextError(ctx, model)
	case errors.As(err, &end):
		return claimFailed(model, end)
	case errors.As(err, &known) && failure.In(known) != nil:
		return failure.Retold(known, model)
	case known != nil:
		return err
	}
	return apierr.New(apierr.Cancelled, err, "model %q", model)
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
func (c *Cache) madeMeanwhile(at *attempt, scope string) *meanwhile {
	if at.OnMiss == Refresh || at.OnMiss == Bypass || scope == "" {
		return nil
	}
	for b, err := range c.stored(at.plan, []string{scope}) {
		if err != nil {
			return nil // whoever makes it will say so
		}
		if at.plan.exactly(b) && !at.unserved.has(b.ID) && c.barred(at, b) == "" {
			return &meanwhile{result: &compiled{build: b, found: true}, about: at.about(scope, "asked for")}
		}
	}
	return nil
}
