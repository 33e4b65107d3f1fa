// Package plan makes the plans of requests: model digest, request key, runtime and build key.
package plan

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// Planner makes plans of requests.
type Planner struct {
	Runtimes   *runtimes.Set
	Models     *identity.Models
	Workspaces *workspace.Maker

	// Allowed returns the unknown options that the administrator permits. Plans of another
	// generation do not count.
	Allowed func() (names identity.Allowed, generation uint64)
	// TooLarge returns why the request's files are too large to be adopted, "" if they are not.
	TooLarge func(*request.Request) (why string, err error)
}

// WithPlan returns the attempt with its plan.
func (pl *Planner) WithPlan(ctx context.Context, at *request.Attempt) (*request.Attempt, error) {
	p, err := pl.plan(ctx, at)
	if err != nil {
		return nil, err
	}
	return at.WithPlan(p), nil
}

func (pl *Planner) plan(ctx context.Context, at *request.Attempt) (*request.Plan, error) {
	facts, err := pl.Runtimes.Devices(ctx, asker(at), at.Content, false)
	if err := givenUpError(ctx, at.Name, err); err != nil {
		return nil, err
	}
	library := at.Content.Spec.ORTLibrary
	switch {
	case errors.Is(err, runtimes.ErrFilesChanging), errors.Is(err, runtimes.ErrReplaced):
		return nil, request.WorkerError(err, "runtime %q", library)
	case err != nil:
		return nil, apierr.New(apierr.Unavailable, err, "runtime %q cannot be probed", library)
	}
	p := &request.Plan{}
	devicesOf := func(ep identity.EP) ([]compilers.Device, error) {
		return runtimes.ResolveDevices(facts, ep)
	}
	allowed, _ := pl.Allowed()
	if p.Canonical, err = at.Terms().Record(ctx, allowed, devicesOf); err != nil {
		return nil, err
	}
	p.RequestKey, p.Record = p.Canonical.Key()
	p.RecordJSON = p.Canonical.JSON()
	if p.EPs, err = runtimes.ResolveEPs(at.EPs, p.Canonical.EPs, at.Content); err != nil {
		return nil, err
	}
	p.OnlyProcessors = runtimes.OnlyProcessors(facts, p.EPs)
	if at.OnMiss == request.KeyOnly {
		// the request key needs no fingerprint, so it is known even if the EP cannot compile
		return p, nil
	}
	if err := pl.marks(ctx, at, p); err != nil {
		if left := givenUpError(ctx, at.Name, err); left != nil {
			return nil, left
		}
		return nil, noFingerprintError(at, p, err)
	}
	pl.Name(p, at.Content)
	return p, nil
}

// noFingerprintError returns the error of a request for execution providers without a fingerprint.
// It names options as a cause only if the request gave some.
func noFingerprintError(at *request.Attempt, p *request.Plan, err error) error {
	names := request.EPNames(at.EPs)
	switch {
	case errors.Is(err, compilers.ErrNoContexts):
		return apierr.New(apierr.CompileFailed, err, "execution provider %s", names).
			WithFact("reason", string(failure.NoNode))
	case p.OnOwnModel:
		var none *compilers.NoNodesError
		if errors.As(err, &none) {
			err = none
		}
		err = request.WorkerError(err,
			"model %q does not compile, and neither do the smallest models for %s", at.Name, names)
	case errors.Is(err, compilers.ErrCrash):
		return apierr.New(apierr.Unavailable, err,
			"execution provider %s cannot compile here, not even a model of one node", names).
			WithHint("its code, or a library that it uses, ended the worker: try another " +
				"version, device or option of it")
	case errors.As(err, new(*compilers.ExitError)), errors.Is(err, compilers.ErrTimeout):
		return apierr.New(apierr.Unavailable, err,
			"execution provider %s cannot compile here, not even a model of one node", names).
			WithHint("its files may be damaged or in the middle of an update")
	default:
		err = request.WorkerError(err, "execution provider %s cannot compile here", names)
	}
	var refused *apierr.Error
	f := failure.FromError(err)
	if given := at.GivenOptions(); given != "" && f != nil && errors.As(err, &refused) &&
		(f.Reason == failure.NoNode || f.Reason == failure.Refused) {
		const suspect = "; or the execution provider may refuse an option: "
		refused.Hint = strings.TrimPrefix(refused.Hint+suspect+given, "; or ")
	}
	return err
}

// Name sets the plan's facts about the libraries that would make a build, and the build key.
func (pl *Planner) Name(p *request.Plan, rc *runtimes.Content) {
	p.Facts = rc.EPFacts(p.EPs, p.Marks)
	for i := range p.Facts {
		p.Facts[i].DriverVersion, _ = pl.Runtimes.Machine().Driver(p.Facts[i].Name, p.Marks[i])
	}
	p.BuildKey = identity.BuildKey(p.RequestKey, p.Facts, p.Canonical.Route)
	p.MarksDigest = p.Marks.Digest(p.Facts)
}

// marks sets the fingerprints of the plan's execution providers. If an EP takes none of the tiny
// models, its fingerprint is made with the request's own model.
func (pl *Planner) marks(ctx context.Context, at *request.Attempt, p *request.Plan) error {
	var err error
	p.Marks, err = pl.Runtimes.Fingerprints(ctx, asker(at), at.Content, p.EPs, false)
	if at.Graph == nil || !errors.Is(err, compilers.ErrNoModelCompiled) {
		return err
	}
	p.OnOwnModel = true
	key := pl.Runtimes.Key("fingerprint", at.Content, p.RequestKey[:])
	onModel := func(ctx context.Context, model string) (runtimes.FingerprintResult, error) {
		return pl.Runtimes.MakeFingerprints(ctx, at.Content, p.EPs,
			FingerprintJob(p.Canonical, model))
	}
	made, err := workspace.Remember(ctx, pl.Workspaces, at.Request, key,
		runtimes.FingerprintResult.IsFinal, workspace.WithCopy(pl.Workspaces, p.Canonical, onModel))
	p.Marks, err = made.For(p.EPs, err)
	return err
}

// FingerprintJob returns a job with a request's model, for compilers.Fingerprint and
// compilers.Control.
func FingerprintJob(r identity.Record, model string) *compilers.Job {
	return &compilers.Job{Model: model, Session: r.Session}
}

// asker describes the attempt to the runtimes, for errors and the list of jobs.
func asker(at *request.Attempt) runtimes.Asker {
	return runtimes.Asker{Request: true, UID: at.Peer.UID, Model: at.Name, Phase: at.Phase}
}

// givenUpError returns the error of a request that disconnected or was cancelled, nil if err is
// another error.
func givenUpError(ctx context.Context, model string, err error) error {
	if err != nil && (ctx.Err() != nil || errors.Is(err, runtimes.ErrGivenUp)) {
		return request.JobError(ctx, model, err)
	}
	return nil
}

// WithIdentity returns the attempt with the identity of every model of the request.
func (pl *Planner) WithIdentity(ctx context.Context,
	at *request.Attempt) (*request.Attempt, error) {
	why, err := pl.TooLarge(at.Request)
	if err != nil {
		return nil, err
	}
	if why != "" {
		known := *at
		known.TooLarge, at = why, &known
	}
	return at.WithIdentity(ctx, pl.Models)
}

// PlanForeign plans a request for libraries that the daemon does not run.
func (pl *Planner) PlanForeign(ctx context.Context, at *request.Attempt) (*request.Plan, error) {
	if len(at.Runtime.ORTVersion) > request.MaxVersion {
		return nil, apierr.New(apierr.BadRequest, nil,
			"ONNX Runtime's version %.40q...: not a version", at.Runtime.ORTVersion)
	}
	p := &request.Plan{Outside: true, Libraries: make(map[string]cas.Stamp)}
	allowed, _ := pl.Allowed()
	var err error
	if p.Canonical, err = at.Terms().Record(ctx, allowed, identity.UnresolvedDevices); err != nil {
		return nil, err
	}
	p.RequestKey, p.Record = p.Canonical.Key()
	p.RecordJSON = p.Canonical.JSON()
	for i, ep := range at.EPs {
		ref := at.Runtime.Library(ep.Name)
		at.Phase("reading")
		digest, stamp, err := pl.Runtimes.OwnDigest(ctx, at.Peer.UID, ref)
		if err != nil {
			return nil, err
		}
		p.Libraries[ep.Name] = stamp
		info, _ := compilers.EPByName(ep.Name)
		one := compilers.EP{Name: ep.Name, Library: ref.Path,
			Options: info.Resolve(ref.Path, identity.LibraryBaseNames(info, ep.Options))}
		facts := index.EPFacts{Name: ep.Name, Library: strings.ToValidUTF8(ref.Path, "?"),
			LibraryDigest: digest}
		for _, d := range p.Canonical.EPs[i].Devices {
			one.Devices = append(one.Devices, compilers.Device(d))
			facts.Devices = append(facts.Devices,
				fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
		p.EPs, p.Facts = append(p.EPs, one), append(p.Facts, facts)
	}
	p.BuildKey = identity.ForeignBuildKey(p.RequestKey, p.Facts, p.Canonical.Route,
		at.Runtime.ORTVersion, pl.Runtimes.Machine().ID())
	return p, nil
}
