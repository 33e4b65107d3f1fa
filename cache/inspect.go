package cache

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// List pages through the builds that the peer may see, in the order of their ids. Next is empty where
// that was all.
func (c *Cache) List(ctx context.Context, p Peer, w *wire.List,
	progress func(Progress)) (*wire.ListReply, error) {
	limit := 500
	if w.Limit > 0 {
		limit = min(limit, int(w.Limit))
	}
	var after index.BuildID
	var err error
	if w.After != "" {
		if after, err = index.ParseBuildID(w.After); err != nil {
			return nil, apierr.New(apierr.BadRequest, err, "list: page").
				WithHint("ask from the beginning")
		}
	}
	looked, all := 0, uint64(0)
	if progress != nil {
		space, err := c.index.Space()
		if err != nil {
			return nil, apierr.New(apierr.Internal, err, "list")
		}
		all = space.Builds
	}
	var page []index.Build // and one more, where there is one
	err = c.index.EachAfter(ctx, after, func(b index.Build) error {
		if looked++; looked%farAfter == 0 {
			far(progress, "reading builds", "builds", before(b.ID, all), all)
		}
		if c.rights.MaySee(p, b.ID, b.Scope) && isListed(w, &b) {
			page = append(page, b)
		}
		if len(page) > limit {
			return errStop
		}
		return nil
	})
	if err != nil && !errors.Is(err, errStop) {
		return nil, apierr.New(apierr.Internal, err, "list")
	}
	reply, left := &wire.ListReply{}, wire.Left(wire.MaxReply)
	for i := range page {
		one, err := c.listed(p, &page[i])
		if err != nil {
			return nil, apierr.New(apierr.Internal, err, "list")
		}
		if i == limit || !left.Takes(one) && i > 0 {
			reply.Next = page[i-1].ID.String()
			break
		}
		reply.Builds = append(reply.Builds, one)
	}
	return reply, nil
}

// before is about how many of so many builds come before this one: ids are random.
func before(id index.BuildID, all uint64) uint64 {
	return uint64(float64(binary.BigEndian.Uint32(id[:])) / (1 << 32) * float64(all))
}

// isListed tells whether a build is one that List asks for.
func isListed(w *wire.List, b *index.Build) bool {
	if w.Model != "" && !slices.ContainsFunc(b.Models(), func(m index.Member) bool {
		return strings.HasPrefix(m.ModelDigest.String(), w.Model) ||
			strings.Contains(m.ModelName, w.Model)
	}) {
		return false
	}
	return w.Ep == "" || slices.ContainsFunc(b.EPs,
		func(e index.EPFacts) bool { return e.Name == w.Ep })
}

// listing returns what is known of a build and its use. listed adds how it is kept, and what its
// removal would free.
func (c *Cache) listing(b *index.Build) *wire.Build {
	state, g := c.index.Journal.StateOf(b.ID), c.gains.of(b.ID)
	lastUsed, hits := c.index.Uses.Last(b.ID)
	out := &wire.Build{
		Build: b.BuildKey.String(), RequestKey: b.RequestKey.String(),
		ModelDigest: b.ModelDigest.String(), ModelName: b.ModelName, OrtVersion: b.ORTVersion,
		Scope: b.Scope, Graph: b.Graph, CreatedMs: wire.Milliseconds(b.Created),
		CompileSeconds: b.CompileSeconds, State: cmp.Or(state.Name, index.Current),
		Reason: state.Reason, LastUsedMs: wire.Milliseconds(lastUsed), Hits: hits,
		LoadCheck: b.LoadCheck, VerifiedOutput: b.VerifiedOutput, LoadSeconds: g.Load,
		SourceLoadSeconds: g.SourceLoad, Members: membersReply(b.Members),
	}
	_, out.Pinned = c.index.Journal.Pinned(b.ID)
	setJudgement(out, c.standing(b))
	if b.Put {
		out.MadeBy = fmt.Sprintf("uid %d", b.UID)
	}
	if !b.Converted.ID.IsZero() {
		out.ConvertedFrom = b.Converted.BuildKey.String()
	}
	if v := c.views.Current(b.ID); v != nil {
		if held, _ := v.Held(); held { // a folder that cannot be opened is held by nobody
			out.Leases = 1
		}
	}
	if len(b.EPs) > 0 {
		ep := b.EPs[0]
		out.Ep, out.EpVersion, out.EpLibraryDigest = ep.Name, ep.Version, ep.LibraryDigest.String()
		out.SdkVersion, out.HardwareArchitecture = ep.SDKVersion, ep.HardwareArchitecture
		out.CompatibilityString, out.DriverVersion = ep.CompatibilityString, ep.DriverVersion
	}
	for _, f := range b.Files {
		out.Files = append(out.Files, &wire.File{Name: f.Name, Size: f.Size,
			Digest: f.Digest.String()})
	}
	return out
}

func membersReply(members []index.Member) (out []*wire.Member) {
	for _, m := range members {
		out = append(out, &wire.Member{Name: m.ModelName, ModelDigest: m.ModelDigest.String(),
			Graph: m.Graph, SessionOptions: m.SessionOptions})
	}
	return out
}

// setJudgement says what a build is good for.
func setJudgement(out *wire.Build, j Judgement) {
	if j.Source != "" || j.Reason != "" { // else nobody judged it
		out.Compatibility, out.CompatibilitySource = j.Verdict.String(), j.Source
		out.CompatibilityReason = wire.Valid(j.Reason)
		out.CompatibilityRuntime, out.JudgedMs = j.Runtime, wire.Milliseconds(j.At)
	}
}

// listed is listing of a build that is there.
func (c *Cache) listed(p Peer, b *index.Build) (*wire.Build, error) {
	own, err := c.ownBytes(p, b)
	if err != nil {
		return nil, err
	}
	out := c.listing(b)
	out.KeptAs, out.OwnBytes = c.formWord(b), own
	return out, nil
}

// Show tells everything about the builds that a name means, each with its record, and the history of
// their requests: the latest of it.
func (c *Cache) Show(ctx context.Context, p Peer, name string) (*wire.ShowReply, error) {
	builds, err := c.find(ctx, p, []string{name})
	if err != nil {
		return nil, err
	}
	reply, left := &wire.ShowReply{}, wire.Left(wire.MaxReply)
	var history []string
	told := make(map[index.RequestKey]bool)
	for i := range builds {
		b := &builds[i]
		one, err := c.listed(p, b)
		if err != nil {
			return nil, apierr.New(apierr.Internal, err, "show %q", name)
		}
		one.KeptText = wire.Valid(c.keptAs(b))
		if !left.TakesBytes(proto.Size(one)+len(b.RecordJSON)+8) && i > 0 {
			reply.More = uint64(len(builds) - i)
			break
		}
		reply.Builds, reply.Records = append(reply.Builds, one), append(reply.Records, b.RecordJSON)
		if told[b.RequestKey] {
			continue
		}
		told[b.RequestKey] = true
		events, err := c.index.Journal.History(b.RequestKey)
		if err != nil {
			return nil, apierr.New(apierr.Internal, err, "history of %s", b.RequestKey)
		}
		for _, e := range events {
			one := fmt.Sprintf("%s %s: %s", e.At.Format(time.RFC3339), e.Kind, e.Text)
			history = append(history, wire.Valid(one))
		}
	}
	from := len(history)
	for from > 0 && left.TakesBytes(len(history[from-1])) {
		from--
	}
	reply.History = history[from:]
	return reply, nil
}

// minPrefix is the shortest prefix of a digest that names something.
const minPrefix = index.MinPrefix

// eachNamed calls fn with every build that one of the names means, each once, as far as the peer may see it: a request key, build key, build
// id or model digest, a prefix of one, or a model's name. A name that means nothing is an error, after fn was called with the others.
func (c *Cache) eachNamed(ctx context.Context, p Peer, names []string, fn func(*index.Build) error) error {
	told := make(map[index.BuildID]bool)
	for _, name := range names {
		used := false
		err := c.index.Named(ctx, name, func(b index.Build) error {
			if !c.rights.MaySee(p, b.ID, b.Scope) {
				return nil
			}
			used = true
			if told[b.ID] {
				return nil
			}
			if len(names) > 1 {
				told[b.ID] = true
			}
			return fn(&b)
		})
		if err != nil {
			var e *apierr.Error
			if errors.As(err, &e) {
				return err
			}
			return searchError(ctx, err)
		}
		if !used {
			return apierr.New(apierr.NotFound, nil, "no entry %q", name).WithHint("%s", hintOf(name))
		}
	}
	return nil
}

// hintOf says what to do about a name that means nothing.
func hintOf(name string) string {
	const list = "epcachectl list shows what there is"
	if name != "" && len(name) < minPrefix && strings.Trim(name, "0123456789abcdef") == "" {
		return fmt.Sprintf("of a key at least %d digits are needed; %s", minPrefix, list)
	}
	return list
}

// maxFound bounds the records that are in memory of what names mean. Applications that call all their models one name have more.
const maxFound = 1000

// find gives the builds that the names mean, see eachNamed.
func (c *Cache) find(ctx context.Context, p Peer, names []string) (out []index.Build, err error) {
	err = c.eachNamed(ctx, p, names, func(b *index.Build) error {
		if len(out) == maxFound {
			return apierr.New(apierr.BadRequest, nil, "%q means more than %d builds", names, maxFound).WithHint("name one by its key: epcachectl list --model NAME shows them")
		}
		out = append(out, *b)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// idsOf gives the ids of the builds that the names mean, see eachNamed.
func (c *Cache) idsOf(ctx context.Context, p Peer, names []string) (ids []index.BuildID, err error) {
	err = c.eachNamed(ctx, p, names, func(b *index.Build) error {
		ids = append(ids, b.ID)
		return nil
	})
	return ids, err
}

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

var errStop = errors.New("enough")
