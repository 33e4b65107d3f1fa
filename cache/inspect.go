package cache

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/epcached/epcached/cache/runtimes"
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
	for _, rt := range c.runtimes.All() {
		facts := &wire.RuntimeFacts{Directory: rt.Name, Registered: rt.Registered,
			ProbedMs: wire.Milliseconds(c.now()),
			State:    rt.State(), Watched: c.runtimes.Watched(rt)}
		if rc := rt.Found(); rc == nil {
			facts.Error = "not looked at yet, or not to be used: epcachectl probe tells"
		} else {
			facts.OrtVersion, facts.OrtLibrary = rc.Spec.ORTVersion, rc.Spec.ORTLibrary
			for _, l := range rc.Spec.EPs {
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

// Probe looks at one runtime, or with an empty reference at all of them.
func (c *Cache) Probe(ctx context.Context, p Peer, ref RuntimeRef,
	fresh bool) (*wire.ProbeReply, error) {
	list := c.runtimes.All()
	if ref.Directory != "" || len(ref.EPLibraries) > 0 {
		rt, _, err := c.runtimes.Resolve(ctx, (&Request{Peer: p, Runtime: ref}).wanted(), func(string) {})
		if err != nil {
			return nil, err
		}
		list = []*runtimes.Runtime{rt}
	}
	if fresh && !c.rights.Administrator(p) {
		return nil, apierr.New(apierr.NotAllowed, nil, "probing anew is for administrators")
	}
	out := &wire.ProbeReply{}
	for _, rt := range list {
		look := c.runtimes.Probe
		if fresh {
			look = c.runtimes.Refresh
		}
		facts := look(ctx, rt)
		out.Runtimes = append(out.Runtimes, factsReply(&facts))
		if ctx.Err() != nil {
			return nil, apierr.New(apierr.Cancelled, ctx.Err(), "probe")
		}
	}
	out.Sandbox = c.sandboxLines(ctx)
	return out, nil
}

// factsReply is what clients are told of a runtime.
func factsReply(f *runtimes.Facts) *wire.RuntimeFacts {
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
