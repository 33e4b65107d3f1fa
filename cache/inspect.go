package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// Status counts, and tells of the runtimes as they were when last looked at, without devices. What is
// the process's and the socket's is left to the caller.
func (c *Cache) Status(ctx context.Context) (*wire.StatusReply, error) {
	space, err := c.Space()
	if err != nil {
		return nil, err
	}
	n := c.index.Counters.All()
	s := &wire.StatusReply{UptimeSeconds: time.Since(c.started).Seconds(), StateDirectory: c.dir,
		Space: space, Hits: n["hits"], Misses: n["misses"], Compiles: n["compiles"],
		Failures: n["failures"], CompileSecondsSaved: float64(n["saved_milliseconds"]) / 1000,
		Jobs: uint32(c.flights.count()), Warnings: c.configured.Load().warnings(),
		Sandbox: c.sandboxLines(ctx)}
	if s.Sourceless, err = c.sourceless(ctx); err != nil {
		return nil, apierr.New(apierr.Internal, err, "builds")
	}
	if why := c.index.Rebuilt(); why != "" {
		s.Warnings = append(s.Warnings, "the index was rebuilt at the start: "+why)
	}
	for _, f := range c.index.Problems() {
		s.Warnings = append(s.Warnings, fmt.Sprintf("%s %s: %s", f.Kind, f.Object, f.Detail))
	}
	for _, rt := range c.runtimes.all() {
		facts := &wire.RuntimeFacts{Directory: rt.name, Registered: rt.registered,
			ProbedMs: wire.Milliseconds(c.now()),
			State:    *rt.state.Load(), Watched: c.watcher.How(rt.subject)}
		if rc := rt.facts.Load(); rc == nil {
			facts.Error = "not looked at yet, or not to be used: epcachectl probe tells"
		} else {
			facts.OrtVersion, facts.OrtLibrary = rc.spec.ORTVersion, rc.spec.ORTLibrary
			for _, l := range rc.spec.EPs {
				facts.Eps = append(facts.Eps, &wire.EpFacts{Name: l.EP, Library: l.Path})
			}
		}
		s.Runtimes = append(s.Runtimes, facts)
	}
	if len(s.Runtimes) == 0 {
		s.Warnings = append(s.Warnings, "no runtime is registered: nothing can be compiled for clients that bring none")
	}
	return s, nil
}

// RuntimeFacts is what is known of one runtime.
type RuntimeFacts struct {
	Name       string
	Registered bool
	Spec       compilers.Runtime
	Digests    map[string]string // by EP
	Facts      compilers.Facts
	Marks      map[string]compilers.Fingerprint // by EP, with default options
	MarkErrors map[string]string                // by EP: why there is none
	Drivers    map[string]Driver                // by EP
	Error      string
	At         time.Time

	State    string    // "ready", "changing", "unusable"
	Watched  string    // "inotify", or "polled: <why>"
	Changes  []string  // what was different when it was last assessed, a line each
	Previous time.Time // when it was assessed before that; zero: never

	unsettled bool // the files changed meanwhile, or it was cancelled: an error among these says nothing of the runtime
}

// Driver is the version of an execution provider's driver, and where it is from.
type Driver struct {
	Version, Source string
}

// Probe looks at one runtime, or with an empty reference at all of them.
func (c *Cache) Probe(ctx context.Context, p Peer, ref RuntimeRef,
	fresh bool) (*wire.ProbeReply, error) {
	list := c.runtimes.all()
	if ref.Directory != "" || len(ref.EPLibraries) > 0 {
		rt, _, err := c.resolve(ctx, &Request{Peer: p, Runtime: ref}, func(string) {})
		if err != nil {
			return nil, err
		}
		list = []*runtime{rt}
	}
	if fresh && !c.rights.Administrator(p) {
		return nil, apierr.New(apierr.NotAllowed, nil, "probing anew is for administrators")
	}
	out := &wire.ProbeReply{}
	for _, rt := range list {
		look := c.refresh
		if !fresh {
			look = func(ctx context.Context, rt *runtime) RuntimeFacts {
				return c.probeRuntime(ctx, rt, false)
			}
		}
		facts := look(ctx, rt)
		out.Runtimes = append(out.Runtimes, facts.reply())
		if ctx.Err() != nil {
			return nil, apierr.New(apierr.Cancelled, ctx.Err(), "probe")
		}
	}
	out.Sandbox = c.sandboxLines(ctx)
	return out, nil
}

// reply is what clients are told of a runtime.
func (f *RuntimeFacts) reply() *wire.RuntimeFacts {
	out := &wire.RuntimeFacts{
		Directory: f.Name, OrtVersion: cmp.Or(f.Facts.ORTVersion, f.Spec.ORTVersion),
		OrtLibrary: f.Spec.ORTLibrary, OrtBuild: f.Facts.ORTBuild, Error: wire.Valid(f.Error),
		Registered: f.Registered, State: f.State, Watched: f.Watched, Changes: f.Changes,
		ProbedMs: wire.Milliseconds(f.At), PreviousMs: wire.Milliseconds(f.Previous),
	}
	for _, ep := range f.Facts.EPs {
		mark, driver := f.Marks[ep.Name], f.Drivers[ep.Name]
		one := &wire.EpFacts{Name: ep.Name, Library: ep.Library, LibraryDigest: f.Digests[ep.Name],
			Version: mark.EPVersion, Error: wire.Valid(ep.Error), DriverVersion: driver.Version,
			DriverSource: driver.Source}
		for i, d := range ep.Devices {
			dev := &wire.DeviceFacts{Type: d.Type, VendorId: d.VendorID, Vendor: d.Vendor,
				DeviceId:   d.DeviceID,
				EpMetadata: d.EPMetadata, DeviceMetadata: d.DeviceMetadata}
			if i == 0 { // which the fingerprint is of
				dev.SdkVersion, dev.HardwareArchitecture = mark.SDKVersion, mark.Hardware()
				dev.CompatibilityString, dev.Error = mark.CompatibilityString,
					wire.Valid(f.MarkErrors[ep.Name])
			}
			one.Devices = append(one.Devices, dev)
		}
		out.Eps = append(out.Eps, one)
	}
	return out
}

func (c *Cache) probeRuntime(ctx context.Context, rt *runtime, fresh bool) RuntimeFacts {
	out := RuntimeFacts{Name: rt.name, Registered: rt.registered, At: c.now(), Drivers: make(map[string]Driver),
		Digests: make(map[string]string), Marks: make(map[string]compilers.Fingerprint), MarkErrors: make(map[string]string)}
	rc, err := c.content(ctx, rt, func(string) {})
	out.State, out.Watched = *rt.state.Load(), c.watcher.How(rt.subject)
	if last, ok := c.probes.lastProbe(rt); ok {
		out.Changes, out.Previous = last.Changes, last.Previous
	}
	if err != nil {
		out.Error, out.unsettled = err.Error(), unsettled(ctx, err)
		return out
	}
	out.Spec = rc.spec
	for ep, d := range rc.digests {
		out.Digests[ep] = d.String()
	}
	if out.Facts, err = c.probes.facts(ctx, byItself(), rc, fresh); err != nil {
		out.Error, out.unsettled = err.Error(), unsettled(ctx, err)
		return out
	}
	for _, ep := range out.Facts.EPs {
		if ep.Error != "" {
			continue
		}
		mark, err := c.defaultFingerprint(ctx, rc, out.Facts, ep.Name, fresh)
		if err != nil {
			out.MarkErrors[ep.Name] = err.Error()
			out.unsettled = out.unsettled || unsettled(ctx, err)
			continue
		}
		out.Marks[ep.Name] = mark
		if v, source := c.machine.Driver(ep.Name, mark); v != "" {
			out.Drivers[ep.Name] = Driver{v, source}
		}
	}
	return out
}

// defaultFingerprint is what a build made with the EP's first device and default options would say of itself.
func (c *Cache) defaultFingerprint(ctx context.Context, rc *runtimeContent, facts compilers.Facts, name string, fresh bool) (compilers.Fingerprint, error) {
	a, err := againstEP(rc, facts, name)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	marks, err := c.probes.fingerprints(ctx, byItself(), rc, a.eps, fresh)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	if len(marks) == 0 {
		return compilers.Fingerprint{}, errors.New("the worker gave no fingerprint")
	}
	return marks[0], nil
}
