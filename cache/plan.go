package cache

import (
	"context"
	"errors"
	"strings"
	"sync"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// plan is a request thought through for one runtime: what it is called, and how it would be compiled.
type plan struct {
	canonical  canonical
	record     []byte
	recordJSON string
	requestKey index.RequestKey
	eps        []compilers.EP // resolved: library, devices, options as the EP gets them
	marks      []compilers.Fingerprint
	facts      []index.EPFacts
	buildKey   index.BuildKey
	beside     bool                 // the execution providers have no device to keep for themselves
	outside    bool                 // for libraries that are not run here
	libraries  map[string]cas.Stamp // then: those that were hashed, by EP
}

// plans remembers the plans of one runtime by the request as it was spelled, so that a hit neither parses options
// nor asks what devices there are.
type plans struct {
	mu    sync.RWMutex
	under uint64             // settings.planning that known was made with; guarded by mu
	known map[[32]byte]*plan // guarded by mu
}

// maxPlans bounds the memory that remembered plans take; past it all are forgotten.
const maxPlans = 1 << 12

func (ps *plans) load(key [32]byte, under uint64) *plan {
	ps.mu.RLock()
	defer ps.mu.RUnlock()
	if ps.under != under {
		return nil
	}
	return ps.known[key]
}

func (ps *plans) save(key [32]byte, p *plan, under uint64) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if under < ps.under {
		return // made with what is not in force any more
	}
	if ps.known == nil || len(ps.known) >= maxPlans || under > ps.under {
		ps.known, ps.under = make(map[[32]byte]*plan), under
	}
	ps.known[key] = p
}

// plan gives the request's plan for the runtime with these contents.
func (c *Cache) plan(ctx context.Context, r *Request, model cas.Digest, rc *runtimeContent, progress func(string)) (*plan, error) {
	spelled, keep := r.spelling(model)
	under := c.settings.Load().planning
	if keep {
		// A plan that was only made for its key lacks the rest, and is not kept.
		if p := rc.plans.load(spelled, under); p != nil {
			return p, nil
		}
	}
	p, err := c.newPlan(ctx, r, model, rc, progress)
	if err != nil {
		return nil, err
	}
	if keep && r.OnMiss != KeyOnly {
		rc.plans.save(spelled, p, under)
	}
	return p, nil
}

// spelling digests the request as it came. Requests with option files are not remembered: a descriptor is not a
// spelling.
func (r *Request) spelling(model cas.Digest) ([32]byte, bool) {
	raw := canonical{Version: recordVersion, Model: model, SessionOptions: r.SessionOptions, FreeDimensions: r.FreeDimensions,
		FreeDimensionsByDenotation: r.FreeDimensionsByDenotation, GraphOptimizationLevel: r.GraphOptimizationLevel,
		Embed: r.Embed, Route: r.Route, Output: r.Output.spelled(), Group: r.group, Member: r.member}
	raw.EPs = make([]canonicalEP, len(r.EPs))
	for i, ep := range r.EPs {
		if len(ep.Files) > 0 {
			return [32]byte{}, false
		}
		raw.EPs[i] = canonicalEP{Name: ep.Name, Options: ep.Options, Devices: canonicalDevices(ep.Devices)}
	}
	return digestOf(raw.encode()), true
}

func canonicalDevices(devices []compilers.Device) []canonicalDevice {
	out := make([]canonicalDevice, len(devices))
	for i, d := range devices {
		out[i] = canonicalDevice(d)
	}
	return out
}

func (c *Cache) newPlan(ctx context.Context, r *Request, model cas.Digest, rc *runtimeContent, progress func(string)) (*plan, error) {
	progress("probing")
	facts, err := c.probes.facts(ctx, inquirer(r), rc, false)
	if err := givenUp(ctx, r, err); err != nil {
		return nil, err
	}
	if err != nil {
		if errors.Is(err, errMoving) || errors.Is(err, errReplaced) {
			return nil, workerError(err, "runtime %q", rc.spec.ORTLibrary)
		}
		return nil, fail(Unavailable, err, "runtime %q cannot be probed", rc.spec.ORTLibrary)
	}
	p := &plan{}
	if p.canonical, err = c.settings.Load().canonicalRequest(ctx, r, model, func(ep EP) ([]compilers.Device, error) { return resolveDevices(facts, ep) }); err != nil {
		return nil, err
	}
	p.requestKey, p.record = p.canonical.key()
	p.recordJSON = p.canonical.json()
	if p.eps, err = resolveEPs(r.EPs, p.canonical.EPs, rc); err != nil {
		return nil, err
	}
	p.beside = onlyProcessors(facts, p.eps)
	if r.OnMiss == KeyOnly {
		return p, nil // the key needs no fingerprint, so it can be told where nothing compiles
	}
	if p.marks, err = c.probes.fingerprints(ctx, inquirer(r), rc, p.eps, false); err != nil {
		if err := givenUp(ctx, r, err); err != nil {
			return nil, err
		}
		var none *compilers.NoNodesError
		if errors.As(err, &none) {
			return nil, fail(Unavailable, nil, "%s takes not even a model of one node with these devices and options", strings.Join(none.EPs, ", ")).
				hint("an option may not suit this execution provider: %v", p.canonical.options())
		}
		var crash *compilers.ExitError
		if errors.As(err, &crash) || errors.Is(err, compilers.ErrTimeout) {
			return nil, fail(Unavailable, err, "execution provider %s cannot compile here: not even a model of one node", epNames(r.EPs)).
				hint("its files may be damaged, or being replaced")
		}
		return nil, workerError(err, "execution provider %s cannot compile here", epNames(r.EPs))
	}
	c.name(p, rc)
	return p, nil
}

// name fills in what a build would be called, and what is known of what would make it.
func (c *Cache) name(p *plan, rc *runtimeContent) {
	p.facts = rc.epFacts(p.eps, p.marks)
	for i := range p.facts {
		p.facts[i].DriverVersion, _ = c.machine.driver(p.facts[i].Name, p.marks[i])
	}
	p.buildKey = buildKey(p.requestKey, p.facts, p.canonical.Route)
}

// canonicalRequest brings the request into its one spelling. devicesOf finds those that are meant.
func (s *settings) canonicalRequest(ctx context.Context, r *Request, model cas.Digest, devicesOf func(EP) ([]compilers.Device, error)) (canonical, error) {
	out := canonical{Version: recordVersion, Model: model, Embed: r.Embed, Group: r.group, Member: r.member,
		FreeDimensions: orEmpty(r.FreeDimensions)}
	var err error
	if out.FreeDimensionsByDenotation, err = canonicalDenotations(r.FreeDimensionsByDenotation); err != nil {
		return canonical{}, err
	}
	if out.SessionOptions, err = s.canonicalSession(r.SessionOptions); err != nil {
		return canonical{}, err
	}
	if out.Route, err = canonicalRoute(r.Route); err != nil {
		return canonical{}, err
	}
	if out.Output, err = r.Output.canonical(out.Route); err != nil {
		return canonical{}, err
	}
	if out.GraphOptimizationLevel, err = canonicalLevel(r.GraphOptimizationLevel, out.Route); err != nil {
		return canonical{}, err
	}
	for _, ep := range r.EPs {
		one := canonicalEP{Name: ep.Name}
		if one.Options, err = s.canonicalOptions(ep); err != nil {
			return canonical{}, err
		}
		if one.Files, err = fileDigests(ctx, ep); err != nil {
			return canonical{}, err
		}
		devices, err := devicesOf(ep)
		if err != nil {
			return canonical{}, err
		}
		one.Devices = canonicalDevices(devices)
		out.EPs = append(out.EPs, one)
	}
	return out, nil
}

// options lists what the execution providers were told, for people.
func (c *canonical) options() []string {
	var out []string
	for _, ep := range c.EPs {
		for _, name := range sortedKeys(ep.Options) {
			out = append(out, name+"="+ep.Options[name])
		}
	}
	return out
}

func orEmpty(m map[string]int64) map[string]int64 {
	if m == nil {
		return map[string]int64{}
	}
	return m
}

// fileDigests stands for the options that name a file: what counts is its content.
func fileDigests(ctx context.Context, ep EP) (map[string]string, error) {
	out := make(map[string]string, len(ep.Files))
	for name, f := range ep.Files {
		s, err := cas.StampOf(f)
		if err != nil {
			return nil, fail(BadRequest, err, "option %q of %s", name, ep.Name)
		}
		d, err := cas.Sum(ctx, f, 0, s.Size)
		if err != nil {
			return nil, fail(BadRequest, err, "option %q of %s", name, ep.Name)
		}
		out[name] = d.String()
	}
	return out, nil
}

// resolveEPs gives the execution providers as the worker gets them.
func resolveEPs(eps []EP, canon []canonicalEP, rc *runtimeContent) ([]compilers.EP, error) {
	out := make([]compilers.EP, len(eps))
	for i, ep := range eps {
		lib, ok := rc.library(ep.Name)
		if !ok {
			return nil, fail(Unavailable, nil, "the runtime has no execution provider %q", ep.Name)
		}
		options, err := fillOptions(ep.Name, ep.Options, lib)
		if err != nil {
			return nil, err
		}
		out[i] = compilers.EP{Name: ep.Name, Library: lib.Path, Options: options}
		for _, d := range canon[i].Devices {
			out[i].Devices = append(out[i].Devices, compilers.Device(d))
		}
	}
	return out, nil
}

// buildKey is the digest of the request key and of what makes the build besides: for each execution provider its
// library's digest, SDK version, hardware architecture and compatibility string, and the route.
func buildKey(key index.RequestKey, eps []index.EPFacts, route string) index.BuildKey {
	b := appendBytes(nil, 1, key[:])
	for _, ep := range eps {
		m := appendBytes(nil, 1, ep.LibraryDigest[:])
		m = appendBytes(m, 2, []byte(ep.SDKVersion))
		m = appendBytes(m, 3, []byte(ep.HardwareArchitecture))
		m = appendBytes(m, 4, []byte(ep.CompatibilityString))
		b = appendBytes(b, 2, m)
	}
	return index.BuildKey(digestOf(appendBytes(b, 3, []byte(route))))
}
