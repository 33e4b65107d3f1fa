// Package query answers the requests that change nothing: which builds are stored, in which
// representation, how much space they take and share, and their history. It fills the messages that
// clients receive.
package query

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// Options are the dependencies of Queries.
type Options struct {
	Dir      string // the state directory
	UID      uint32 // of the daemon
	Started  time.Time
	Rebuilt  string // why the daemon opened the store again; "": it did not
	Killed   string // how the previous daemon ended, if for memory; else ""
	Now      func() time.Time
	Store    *store.Store
	Stream   *Stream // of the store's events
	Rights   *rights.Rights
	Runtimes *runtimes.Set

	// Configured returns the parts of the configuration that are not in effect.
	Configured func() *Configured
	// Sandbox returns the safeguards that confine workers.
	Sandbox func(context.Context) ([]compilers.Safeguard, error)
	// Jobs counts the jobs that wait or run.
	Jobs func() int
	// Rebuilds returns the builds that can be rebuilt only when their source is available again.
	Rebuilds func() map[index.BuildID]bool
	// Try compiles and loads a tiny model with an EP, and returns the error.
	Try func(context.Context, *runtimes.Runtime, *runtimes.Facts, string) error
	// Owner returns the host's user that owns a container's user.
	Owner    func(uid uint32) uint32
	Failures func(rights.Peer) []failure.Failure
	// ExplainEntry returns the request that an entry's builds answer.
	ExplainEntry func(context.Context, rights.Peer, []index.Build) (*ExplainRequest, error)
	// Remotes returns the state of the remotes.
	Remotes func() []*wire.Remote

	Judge func(*wire.Build, *index.Build) // sets a build's verdict and its measured gain
}

// Queries answers from the records of one store. It is safe for concurrent use.
type Queries struct {
	options Options
	rights  *rights.Rights
	store   *store.Store
	index   *index.Index
	blobs   *cas.Store
	packing *packing.Store
	usages  usageLists

	explaining explainSlots
	searches   chan struct{} // one token for each search for neighbours
}

func New(o Options) *Queries {
	return &Queries{options: o, rights: o.Rights, store: o.Store, index: o.Store.Index(),
		blobs: o.Store.Blobs(), packing: o.Store.Packing(),
		searches:   make(chan struct{}, maxSearches),
		explaining: explainSlots{slots: make(keyed.Slots, maxExplaining)}}
}

// Error returns the error that a client gets for an error of the index or of a file.
func Error(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return apierr.FromContext(ctx, "search")
	}
	return apierr.New(apierr.Internal, err, "search")
}

var errStop = errors.New("enough") // stops an iteration over the index early

// Status returns counts, and the runtimes as they were last probed, without devices. Counts over
// all users are for administrators. The caller fills in the fields of the process and the socket,
// and an ordinary user's jobs.
func (q *Queries) Status(ctx context.Context, p rights.Peer) (*wire.StatusReply, error) {
	s := &wire.StatusReply{UptimeSeconds: time.Since(q.options.Started).Seconds(),
		StateDirectory: q.options.Dir, Sandbox: q.sandboxLines(ctx)}
	var err error
	if s.Space, err = q.spaceFor(ctx, p); err != nil {
		return nil, err
	}
	everything := q.rights.IsAdministrator(p)
	if everything {
		n := q.index.Counters.All()
		s.Hits, s.Misses, s.Compiles, s.Failures = n["hits"], n["misses"], n["compiles"],
			n["failures"]
		s.CompileSecondsSaved = float64(n["saved_milliseconds"]) / 1000
		s.Jobs = uint32(q.options.Jobs())
		if p := q.store.ScrubState().Result(); !p.Began.IsZero() {
			s.Verified = p.String()
		}
	}
	if s.Sourceless, err = q.sourceless(ctx, p); err != nil {
		return nil, apierr.New(apierr.Internal, err, "builds")
	}
	s.Layers = q.layers()
	configured := q.options.Configured()
	for _, one := range configured.Refused {
		s.Warnings = append(s.Warnings,
			"the configuration has mistakes, so the previous one stays in effect: "+one)
	}
	if len(configured.Waiting) > 0 {
		s.Warnings = append(s.Warnings,
			"takes effect after a restart: "+strings.Join(configured.Waiting, ", "))
	}
	if why := q.options.Killed; why != "" {
		s.Warnings = append(s.Warnings, why)
	}
	if why := q.index.Rebuilt(); why != "" {
		s.Warnings = append(s.Warnings, "the index was rebuilt at the start: "+why)
	}
	for _, f := range q.index.Problems() {
		if !everything {
			break
		}
		s.Warnings = append(s.Warnings, fmt.Sprintf("%s %s: %s", f.Kind, f.Object, f.Detail))
	}
	for _, rt := range q.options.Runtimes.All() {
		facts := &wire.RuntimeFacts{Directory: rt.Name, Registered: rt.Registered,
			ProbedMs: wire.Milliseconds(q.options.Now()),
			State:    rt.State(), Watched: q.options.Runtimes.Watched(rt)}
		if rc := rt.LastContent(); rc == nil {
			facts.Error = "not probed yet, or unusable: see epcachectl probe"
		} else {
			facts.OrtVersion, facts.OrtLibrary = rc.Spec.ORTVersion, rc.Spec.ORTLibrary
			for _, l := range rc.Spec.EPs {
				facts.Eps = append(facts.Eps, &wire.EpFacts{Name: l.EP, Library: l.Path})
			}
		}
		s.Runtimes = append(s.Runtimes, facts)
	}
	if len(s.Runtimes) == 0 {
		s.Warnings = append(s.Warnings, "no runtime is registered: the daemon compiles only for "+
			"clients that bring their own")
	}
	return s, nil
}

// layers returns the state of each layer.
func (q *Queries) layers() (out []*wire.Layer) {
	for _, l := range q.store.Layers.States() {
		one := &wire.Layer{Path: wire.Valid(l.Path), Builds: l.Builds, Bytes: l.Bytes}
		if l.Err != nil {
			one.Error = wire.Valid(l.Err.Error())
		}
		for _, why := range l.Refused[:min(len(l.Refused), maxRefused)] {
			one.Refused = append(one.Refused, wire.Valid(why))
		}
		out = append(out, one)
	}
	return out
}

// maxRefused bounds the refused builds of a layer that are listed.
const maxRefused = 16

// Probe probes one runtime, or with an empty reference all of them.
func (q *Queries) Probe(ctx context.Context, p rights.Peer, ref runtimes.Ref,
	fresh bool) (*wire.ProbeReply, error) {
	list := q.options.Runtimes.All()
	if ref.Directory != "" || len(ref.EPLibraries) > 0 {
		rt, _, err := q.options.Runtimes.Resolve(ctx,
			&runtimes.Wanted{Ref: ref, UID: p.UID, MayClaim: true},
			func(string) {})
		if err != nil {
			return nil, err
		}
		list = []*runtimes.Runtime{rt}
	}
	if fresh && !q.rights.IsAdministrator(p) {
		return nil, apierr.New(apierr.NotAllowed, nil, "only administrators may probe again")
	}
	out := &wire.ProbeReply{}
	for _, rt := range list {
		look := q.options.Runtimes.Probe
		if fresh {
			look = q.options.Runtimes.Refresh
		}
		facts := look(ctx, rt)
		out.Runtimes = append(out.Runtimes, FactsReply(&facts))
		if ctx.Err() != nil {
			return nil, apierr.FromContext(ctx, "probe")
		}
	}
	out.Sandbox = q.sandboxLines(ctx)
	return out, nil
}

// FactsReply fills the message that describes a runtime.
func FactsReply(f *runtimes.Facts) *wire.RuntimeFacts {
	out := &wire.RuntimeFacts{
		Directory: f.Name, OrtVersion: cmp.Or(f.Facts.ORTVersion, f.Spec.ORTVersion),
		OrtLibrary: f.Spec.ORTLibrary, OrtBuild: f.Facts.ORTBuild,
		Error:      wire.Valid(runtimes.ErrorText(f.Err)),
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
				DeviceId: d.DeviceID, EpMetadata: d.EPMetadata, DeviceMetadata: d.DeviceMetadata}
			if i == 0 { // the device that the fingerprint belongs to
				dev.SdkVersion, dev.HardwareArchitecture = mark.SDKVersion, mark.Hardware()
				dev.CompatibilityString, dev.Error = mark.CompatibilityString,
					wire.Valid(runtimes.ErrorText(f.MarkErrors[ep.Name]))
			}
			one.Devices = append(one.Devices, dev)
		}
		out.Eps = append(out.Eps, one)
	}
	return out
}

func (q *Queries) sandboxLines(ctx context.Context) (lines []string) {
	measures, err := q.options.Sandbox(ctx)
	if err != nil {
		return []string{wire.Valid("NOT KNOWN: " + err.Error())}
	}
	for _, m := range measures {
		lines = append(lines, wire.Valid(m.String()))
	}
	return lines
}

// Configured lists the parts of the configuration that are not in effect.
type Configured struct {
	Refused []string // mistakes; if there are any, the previous configuration stays in effect
	Waiting []string // names of fields that take effect at the next start
}

// Bounds of counting builds without source. In a larger store only a random part is counted, in
// order of ids. The time is checked once for a number of builds, so that a small store is always
// counted completely.
const (
	sourcelessTime  = 25 * time.Millisecond
	sourcelessBatch = 256
)

// sourceless counts the builds that the peer may see and that have no source model on this machine.
func (q *Queries) sourceless(ctx context.Context, p rights.Peer) (*wire.Sourceless, error) {
	out, reasons := &wire.Sourceless{}, make(map[string]uint64)
	missing := q.options.Rebuilds()
	until := time.Now().Add(sourcelessTime)
	looked := 0
	err := q.index.Each(ctx, func(b index.Build) error {
		if looked++; looked%sourcelessBatch == 0 && time.Now().After(until) {
			return errStop
		}
		if !q.rights.MaySee(p, b.ID, b.Scope) {
			return nil
		}
		out.Looked++
		if why := whySourceless(&b, missing[b.ID]); why != "" {
			out.Builds++
			reasons[why]++
		}
		return nil
	})
	if errors.Is(err, errStop) {
		err = nil
	}
	for _, why := range slices.Sorted(maps.Keys(reasons)) {
		out.Why = append(out.Why, &wire.Sourceless_Why{Text: why, Builds: reasons[why]})
	}
	slices.SortStableFunc(out.Why, func(a, b *wire.Sourceless_Why) int {
		return cmp.Compare(b.Builds, a.Builds)
	})
	return out, err
}

// whySourceless returns why a build cannot be compiled without a request, "" if it can.
func whySourceless(b *index.Build, missing bool) string {
	sources := []index.Source{b.Source}
	for i := 1; i < len(b.Members); i++ {
		sources = append(sources, b.Members[i].Source)
	}
	for _, s := range sources {
		switch {
		case s.Kind != "":
		case b.Imported.Key != "":
			return WhyImported
		case b.Put:
			return WhyPut
		case s.Why == "":
			return WhyUnknown
		default:
			return s.Why
		}
	}
	if missing {
		return WhyMissing
	}
	return ""
}

// Reasons that are not recorded in the build.
const (
	WhyImported = "another machine compiled the model, without sending the source"
	WhyPut      = "an application submitted the compiled model without its source"
	WhyMissing  = "the model was missing or changed when it was to be recompiled"
	WhyUnknown  = "an earlier version kept no copy of the model"
)
