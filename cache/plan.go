package cache

import (
	"context"
	"errors"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
)

// plans remembers the plans of one runtime by the request as it was spelled, so that a hit neither parses options
// nor asks what devices there are.
type plans = memo.Table[memo.Under[[32]byte], *request.Plan]

// maxPlans bounds the memory that remembered plans take.
const maxPlans = 1 << 12

// planned is the attempt with its plan.
func (c *Cache) planned(ctx context.Context, at *request.Attempt) (*request.Attempt, error) {
	p, err := c.plan(ctx, at)
	if err != nil {
		return nil, err
	}
	return at.WithPlan(p), nil
}

// plan gives the attempt's plan for its runtime.
func (c *Cache) plan(ctx context.Context, at *request.Attempt) (*request.Plan, error) {
	if at.Reading != nil {
		return at.Reading.Plan(ctx, at)
	}
	spelled, keep := at.Terms().Spelling()
	key := memo.Under[[32]byte]{Generation: c.settings.Load().planning, Key: spelled}
	if keep {
		// A plan that was only made for its key lacks the rest, and is not kept.
		if p, ok := notesOn(at.Content).plans.Load(key); ok {
			return p, nil
		}
	}
	p, err := c.newPlan(ctx, at)
	if err != nil {
		return nil, err
	}
	if keep && at.OnMiss != request.KeyOnly {
		notesOn(at.Content).plans.Save(key, p, maxPlans)
	}
	return p, nil
}

func (c *Cache) newPlan(ctx context.Context, at *request.Attempt) (*request.Plan, error) {
	at.Phase("probing")
	facts, err := c.runtimes.Devices(ctx, inquirer(at.Request), at.Content, false)
	if err := givenUp(ctx, at.Name, err); err != nil {
		return nil, err
	}
	if err != nil {
		if errors.Is(err, runtimes.ErrMoving) || errors.Is(err, runtimes.ErrReplaced) {
			return nil, request.WorkerError(err, "runtime %q", at.Content.Spec.ORTLibrary)
		}
		return nil, apierr.New(apierr.Unavailable, err, "runtime %q cannot be probed", at.Content.Spec.ORTLibrary)
	}
	p := &request.Plan{}
	devicesOf := func(ep identity.EP) ([]compilers.Device, error) { return runtimes.ResolveDevices(facts, ep) }
	if p.Canonical, err = at.Terms().Record(ctx, c.settings.Load().allowed, devicesOf); err != nil {
		return nil, err
	}
	p.RequestKey, p.Record = p.Canonical.Key()
	p.RecordJSON = p.Canonical.JSON()
	if p.EPs, err = runtimes.ResolveEPs(at.EPs, p.Canonical.EPs, at.Content); err != nil {
		return nil, err
	}
	p.OnlyProcessors = runtimes.OnlyProcessors(facts, p.EPs)
	if at.OnMiss == request.KeyOnly {
		return p, nil // the key needs no fingerprint, so it can be told where nothing compiles
	}
	if err := c.marks(ctx, at, p); err != nil {
		if left := givenUp(ctx, at.Name, err); left != nil {
			return nil, left
		}
		return nil, cannotCompile(at, p, err)
	}
	c.name(p, at.Content)
	return p, nil
}

// cannotCompile says why the request's execution providers have no fingerprint. Options that were not given are not blamed.
func cannotCompile(at *request.Attempt, p *request.Plan, err error) error {
	names := request.EPNames(at.EPs)
	switch {
	case p.OnOwnModel:
		var none *compilers.NoNodesError
		if errors.As(err, &none) {
			err = none
		}
		err = request.WorkerError(err, "model %q does not compile, nor do the smallest models that %s may take", at.Name, names)
	case errors.As(err, new(*compilers.ExitError)), errors.Is(err, compilers.ErrTimeout):
		return apierr.New(apierr.Unavailable, err, "execution provider %s cannot compile here: not even a model of one node", names).
			WithHint("its files may be damaged, or being replaced")
	default:
		err = request.WorkerError(err, "execution provider %s cannot compile here", names)
	}
	var told *apierr.Error
	f := failure.In(err)
	if given := at.GivenOptions(); given != "" && f != nil && errors.As(err, &told) &&
		(f.Reason == failure.NoNode || f.Reason == failure.Refused) {
		told.Hint = strings.TrimPrefix(told.Hint+"; or an option may not suit the execution provider: "+given, "; or ")
	}
	return err
}

// name fills in what a build would be called, and what is known of what would make it.
func (c *Cache) name(p *request.Plan, rc *runtimes.Content) {
	p.Facts = rc.EPFacts(p.EPs, p.Marks)
	for i := range p.Facts {
		p.Facts[i].DriverVersion, _ = c.runtimes.Machine().Driver(p.Facts[i].Name, p.Marks[i])
	}
	p.BuildKey = identity.BuildKey(p.RequestKey, p.Facts, p.Canonical.Route)
	p.MarksDigest = p.Marks.Digest(p.Facts)
}

// marks are the fingerprints that a request's plan needs. Where an EP takes none of the tiny models they are made with the request's own.
func (c *Cache) marks(ctx context.Context, at *request.Attempt, p *request.Plan) error {
	var err error
	if p.Marks, err = c.runtimes.Fingerprints(ctx, inquirer(at.Request), at.Content, p.EPs, false); err == nil || at.Graph == nil || !errors.Is(err, compilers.ErrNotTaken) {
		return err
	}
	p.OnOwnModel = true
	key := c.runtimes.Key("fingerprint", at.Content, p.RequestKey[:])
	onModel := func(ctx context.Context, model string) (runtimes.Prints, error) {
		return c.runtimes.Print(ctx, at.Content, p.EPs, ownJob(p.Canonical, model))
	}
	made, err := rememberOwn(ctx, c, at.Request, key, runtimes.Prints.Last, onCopy(c, p.Canonical, onModel))
	p.Marks, err = made.Of(p.EPs, err)
	return err
}

// ownJob is a job with a request's own model, for compilers.Fingerprint and compilers.Control.
func ownJob(r identity.Record, model string) *compilers.Job {
	return &compilers.Job{Model: model, SessionOptions: r.SessionOptions, FreeDimensions: r.FreeDimensions,
		FreeDimensionsByDenotation: r.FreeDimensionsByDenotation, GraphOptimizationLevel: r.GraphOptimizationLevel}
}
