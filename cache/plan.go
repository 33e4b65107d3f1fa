package cache

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
)

// plan is a request thought through for one runtime: what it is called, and how it would be compiled.
type plan struct {
	canonical  identity.Record
	record     []byte
	recordJSON string
	requestKey index.RequestKey
	eps        []compilers.EP // resolved: library, devices, options as the EP gets them
	marks      judge.Marks
	seen       [32]byte // digest of the marks and drivers
	facts      []index.EPFacts
	buildKey   index.BuildKey
	onModel    bool                 // an EP takes none of the tiny models: its mark was made with the request's own
	beside     bool                 // the execution providers have no device to keep for themselves
	outside    bool                 // for libraries that are not run here
	libraries  map[string]cas.Stamp // then: those that were hashed, by EP
	fitting    []*index.Build       // in a store that is only read: the builds; no key is known
}

// plans remembers the plans of one runtime by the request as it was spelled, so that a hit neither parses options
// nor asks what devices there are.
type plans = memo.Table[memo.Under[[32]byte], *plan]

// maxPlans bounds the memory that remembered plans take.
const maxPlans = 1 << 12

// planned is the attempt with its plan.
func (c *Cache) planned(ctx context.Context, at *attempt) (*attempt, error) {
	p, err := c.plan(ctx, at)
	if err != nil {
		return nil, err
	}
	return at.withPlan(p), nil
}

// plan gives the attempt's plan for its runtime.
func (c *Cache) plan(ctx context.Context, at *attempt) (*plan, error) {
	if at.finding != nil {
		return at.finding.plan(ctx, at)
	}
	spelled, keep := at.terms().Spelling()
	key := memo.Under[[32]byte]{Generation: c.settings.Load().planning, Key: spelled}
	if keep {
		// A plan that was only made for its key lacks the rest, and is not kept.
		if p, ok := notesOn(at.rc).plans.Load(key); ok {
			return p, nil
		}
	}
	p, err := c.newPlan(ctx, at)
	if err != nil {
		return nil, err
	}
	if keep && at.OnMiss != KeyOnly {
		notesOn(at.rc).plans.Save(key, p, maxPlans)
	}
	return p, nil
}

func (c *Cache) newPlan(ctx context.Context, at *attempt) (*plan, error) {
	at.phase("probing")
	facts, err := c.runtimes.Devices(ctx, inquirer(at.Request), at.rc, false)
	if err := givenUp(ctx, at.Name, err); err != nil {
		return nil, err
	}
	if err != nil {
		if errors.Is(err, runtimes.ErrMoving) || errors.Is(err, runtimes.ErrReplaced) {
			return nil, workerError(err, "runtime %q", at.rc.Spec.ORTLibrary)
		}
		return nil, apierr.New(apierr.Unavailable, err, "runtime %q cannot be probed", at.rc.Spec.ORTLibrary)
	}
	p := &plan{}
	devicesOf := func(ep identity.EP) ([]compilers.Device, error) { return runtimes.ResolveDevices(facts, ep) }
	if p.canonical, err = at.terms().Record(ctx, c.settings.Load().allowed, devicesOf); err != nil {
		return nil, err
	}
	p.requestKey, p.record = p.canonical.Key()
	p.recordJSON = p.canonical.JSON()
	if p.eps, err = runtimes.ResolveEPs(at.EPs, p.canonical.EPs, at.rc); err != nil {
		return nil, err
	}
	p.beside = runtimes.OnlyProcessors(facts, p.eps)
	if at.OnMiss == KeyOnly {
		return p, nil // the key needs no fingerprint, so it can be told where nothing compiles
	}
	if err := c.marks(ctx, at, p); err != nil {
		if left := givenUp(ctx, at.Name, err); left != nil {
			return nil, left
		}
		return nil, cannotCompile(at, p, err)
	}
	c.name(p, at.rc)
	return p, nil
}

// cannotCompile says why the request's execution providers have no fingerprint. Options that were not given are not blamed.
func cannotCompile(at *attempt, p *plan, err error) error {
	names := epNames(at.EPs)
	switch {
	case p.onModel:
		var none *compilers.NoNodesError
		if errors.As(err, &none) {
			err = none
		}
		err = workerError(err, "model %q does not compile, nor do the smallest models that %s may take", at.Name, names)
	case errors.As(err, new(*compilers.ExitError)), errors.Is(err, compilers.ErrTimeout):
		return apierr.New(apierr.Unavailable, err, "execution provider %s cannot compile here: not even a model of one node", names).
			WithHint("its files may be damaged, or being replaced")
	default:
		err = workerError(err, "execution provider %s cannot compile here", names)
	}
	var told *apierr.Error
	f := failure.In(err)
	if given := at.options(); given != "" && f != nil && errors.As(err, &told) &&
		(f.Reason == failure.NoNode || f.Reason == failure.Refused) {
		told.Hint = strings.TrimPrefix(told.Hint+"; or an option may not suit the execution provider: "+given, "; or ")
	}
	return err
}

// options lists the provider options that the request gives, "" if it gives none.
func (r *Request) options() string {
	var given []string
	for _, ep := range r.EPs {
		for _, name := range slices.Sorted(maps.Keys(ep.Options)) {
			given = append(given, name+"="+ep.Options[name])
		}
	}
	return strings.Join(given, ", ")
}

// name fills in what a build would be called, and what is known of what would make it.
func (c *Cache) name(p *plan, rc *runtimes.Content) {
	p.facts = rc.EPFacts(p.eps, p.marks)
	for i := range p.facts {
		p.facts[i].DriverVersion, _ = c.runtimes.Machine().Driver(p.facts[i].Name, p.marks[i])
	}
	p.buildKey = identity.BuildKey(p.requestKey, p.facts, p.canonical.Route)
	p.seen = p.marks.Digest(p.facts)
}

// marks are the fingerprints that a request's plan needs. Where an EP takes none of the tiny models they are made with the request's own.
func (c *Cache) marks(ctx context.Context, at *attempt, p *plan) error {
	var err error
	if p.marks, err = c.runtimes.Fingerprints(ctx, inquirer(at.Request), at.rc, p.eps, false); err == nil || at.Graph == nil || !errors.Is(err, compilers.ErrNotTaken) {
		return err
	}
	p.onModel = true
	key := c.runtimes.Key("fingerprint", at.rc, p.requestKey[:])
	onModel := func(ctx context.Context, model string) (runtimes.Prints, error) {
		return c.runtimes.Print(ctx, at.rc, p.eps, ownJob(p.canonical, model))
	}
	made, err := rememberOwn(ctx, c, at.Request, key, runtimes.Prints.Last, onCopy(c, p.canonical, onModel))
	p.marks, err = made.Of(p.eps, err)
	return err
}

// ownJob is a job with a request's own model, for compilers.Fingerprint and compilers.Control.
func ownJob(r identity.Record, model string) *compilers.Job {
	return &compilers.Job{Model: model, SessionOptions: r.SessionOptions, FreeDimensions: r.FreeDimensions,
		FreeDimensionsByDenotation: r.FreeDimensionsByDenotation, GraphOptimizationLevel: r.GraphOptimizationLevel}
}
