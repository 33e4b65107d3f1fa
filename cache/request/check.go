package request

import (
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/modelname"
	"github.com/epcached/epcached/unixsock/wire"
)

// GivenOptions lists the provider options that the request gives, "" if it gives none.
func (r *Request) GivenOptions() string {
	var given []string
	for _, ep := range r.EPs {
		for _, name := range slices.Sorted(maps.Keys(ep.Options)) {
			given = append(given, name+"="+ep.Options[name])
		}
	}
	return strings.Join(given, ", ")
}

// MaxGroup bounds a group: its models are compiled one after the other in one worker.
const MaxGroup = 64

// checkGroup refuses groups that no execution provider compiles.
func (r *Request) checkGroup() error {
	switch {
	case len(r.Group) == 0:
		return nil
	case r.Models() > MaxGroup:
		return badRequest("a group of %d models, more than %d", r.Models(), MaxGroup)
	case r.Embed:
		return badRequest("a group cannot be embedded, because its models share a context binary").
			WithHint("request them one by one, or without embedding")
	case r.OnMiss == ForClaim:
		return badRequest("a group cannot be claimed: only the daemon compiles it").
			WithHint("request it with on_miss wait, or claim the models one by one")
	case r.Output.InitializersFile != "" || r.Output.InitializersInSource:
		return badRequest("a group's initializers cannot be in external files").
			WithHint("request the models one by one")
	}
	for i, m := range r.Group {
		if m.Graph == nil {
			return badRequest("the request has no model %d of the group", i+2)
		}
	}
	return nil
}

// Sharing is the request with the options and sessions that make execution providers share.
func (r *Request) Sharing() *Request {
	out := *r
	if out.Route == "" {
		out.Route = compilers.RouteSessionOptions
	}
	out.EPs = make([]identity.EP, len(r.EPs))
	for i, ep := range r.EPs {
		info, _ := compilers.EPByName(ep.Name)
		ep.Options = info.ForSharing(ep.Options)
		out.EPs[i] = ep
	}
	return &out
}

// NamedMembers returns a group's members with the names that this request gives them, because names
// that other users gave are not shown.
func (r *Request) NamedMembers(members []index.Member) []index.Member {
	out := slices.Clone(members)
	for i := range out {
		out[i].ModelName = ""
		if len(r.Group) > 0 && i < r.Models() {
			out[i].ModelName = r.ModelFiles(i).Name
		}
	}
	return out
}

func badRequest(format string, args ...any) *apierr.Error {
	return apierr.New(apierr.BadRequest, nil, format, args...)
}

// maxEPs and maxOptions bound what one request may carry.
const (
	maxEPs     = 16
	maxOptions = 1024

	maxModelName = modelname.MaxPath
)

// check returns an error for values that no request may have.
func (r *Request) check() error {
	switch {
	case r.Graph == nil:
		return badRequest("the request has no model")
	case len(r.EPs) == 0:
		return badRequest("model %q: the request names no execution provider", r.Name).
			WithHint("for example OpenVINOExecutionProvider or QNNExecutionProvider")
	case len(r.EPs) > maxEPs:
		return badRequest("model %q: %d execution providers, more than %d", r.Name,
			len(r.EPs), maxEPs)
	case len(r.SessionOptions)+len(r.FreeDimensions)+len(r.FreeDimensionsByDenotation) > maxOptions:
		return badRequest("model %q: more than %d options", r.Name, maxOptions)
	}
	for i := range r.Models() {
		if n := len(r.ModelFiles(i).Name); n > maxModelName {
			return badRequest("model %q: its name has %d bytes, more than %d",
				identity.Truncated(r.ModelFiles(i).Name), n, maxModelName)
		}
	}
	if err := r.checkGroup(); err != nil {
		return err
	}
	if r.VerifyOutput < 0 || math.IsNaN(r.VerifyOutput) || math.IsInf(r.VerifyOutput, 0) {
		return badRequest("verify_output %g: must be 0 or more", r.VerifyOutput)
	}
	if !slices.Contains([]string{"", "shared", "user", "none"}, r.Store) {
		return badRequest("store %q: it must be shared, user or none", r.Store)
	}
	seen := make(map[string]bool)
	for _, ep := range r.EPs {
		if ep.Name == "" || len(ep.Name) > 200 || strings.ContainsAny(ep.Name, "/\x00\n") {
			return badRequest("execution provider %q: not a name", ep.Name)
		}
		if seen[ep.Name] {
			return badRequest("execution provider %q is named twice", ep.Name)
		}
		seen[ep.Name] = true
	}
	for name, v := range r.FreeDimensions {
		if v <= 0 {
			return badRequest("free dimension %q: %d is not a size", name, v)
		}
	}
	return nil
}

// scopes returns the scope to store a build of the request in, "" for none, and the scopes to look
// up. Builds of models that every local user can read may be shared. All others are private, also
// those of a file without a name, such as a memfd, because no other user can open it. wish is the
// model's own scope.
func (r *Request) scopes(wish string) (store string, look []string) {
	own := rights.OwnScope(r.Peer)
	store = "shared"
	for _, f := range r.AllFiles() {
		info, err := f.Stat()
		if err != nil || info.Mode().Perm()&0o004 == 0 || info.Sys().(*syscall.Stat_t).Nlink == 0 {
			store = own
		}
	}
	for _, wish := range []string{wish, r.Store} {
		switch {
		case wish == "none":
			store = ""
		case wish == "user" && store != "":
			store = own
		}
	}
	if store == own {
		return store, []string{own, "shared"}
	}
	return store, []string{"shared", own}
}

var onMiss = map[wire.OnMiss]OnMiss{
	wire.OnMiss_WAIT: Wait, wire.OnMiss_FAIL: Fail, wire.OnMiss_REFRESH: Refresh,
	wire.OnMiss_BYPASS: Bypass, wire.OnMiss_KEY_ONLY: KeyOnly, wire.OnMiss_EXPLAIN: Explain,
	wire.OnMiss_BACKGROUND: Background, wire.OnMiss_CLAIM: ForClaim, wire.OnMiss_FETCH: Fetch,
}

// FromWire translates a message of the protocol. Its indices are within the descriptors.
func FromWire(p Peer, w *wire.Acquire, fds []*os.File) (*Request, error) {
	miss, ok := onMiss[w.OnMiss]
	if !ok {
		return nil, apierr.New(apierr.Version, nil,
			"on_miss %s is not supported by this version", w.OnMiss).
			WithHint("use wait, background, fail, fetch, refresh, bypass, key_only or explain")
	}
	if w.Model == nil || int(w.Model.Fd) >= len(fds) {
		return nil, apierr.New(apierr.BadRequest, nil, "the request has no descriptor of a model")
	}
	model := modelFiles([]*wire.Model{w.Model}, fds)[0]
	r := &Request{
		Peer: p, Name: model.Name, Path: model.Path, Graph: model.Graph, External: model.External,
		Group: modelFiles(w.Group, fds),
		CompileTerms: identity.CompileTerms{Embed: w.Embed, Route: w.Route,
			Session: compilers.Session{
				SessionOptions: w.SessionOptions, FreeDimensions: w.FreeDimensions,
				FreeDimensionsByDenotation: w.FreeDimensionsByDenotation,
				GraphOptimizationLevel:     w.GraphOptimizationLevel,
			}, Output: identity.Output{InitializersFile: w.Output.GetExternalInitializersFile(),
				InitializersThreshold: w.Output.GetExternalInitializersThreshold(),
				InitializersInSource:  w.Output.GetKeepInitializersInSource(),
				NodeNamePrefix:        w.Output.GetNodeNamePrefix(),
				Complete:              w.Output.GetComplete()}},
		Runtime: RuntimeOf(w.Runtime, fds), StrictORT: w.StrictOrt, VerifyOutput: w.VerifyOutput,
		OnMiss: miss, Store: w.Store, KeepGoing: w.KeepGoing, KeepsView: w.HoldsView,
		Adopt: w.Adopt,
	}
	for _, ep := range w.Eps {
		one := identity.EP{Name: ep.Name, Options: ep.Options}
		for _, d := range ep.Devices {
			one.Devices = append(one.Devices, compilers.Device{Type: d.Type,
				VendorID: d.VendorId, DeviceID: d.DeviceId, Metadata: d.Metadata})
		}
		if len(ep.OptionFds) > 0 {
			one.Files = make(map[string]*os.File, len(ep.OptionFds))
			for name, fd := range ep.OptionFds {
				one.Files[name] = fds[fd]
			}
		}
		r.EPs = append(r.EPs, one)
	}
	return r, nil
}

// modelFiles translates models.
func modelFiles(group []*wire.Model, fds []*os.File) []identity.Files {
	var out []identity.Files
	for _, m := range group {
		one := identity.Files{Name: m.Name, External: make(map[string]*os.File, len(m.External))}
		if len(m.Path) <= modelname.MaxPath {
			one.Name, one.Path = modelname.Of(m.Path, m.Name), m.Path
		}
		if int(m.Fd) < len(fds) {
			one.Graph = fds[m.Fd]
		}
		for _, x := range m.External {
			if int(x.Fd) < len(fds) {
				one.External[x.Location] = fds[x.Fd]
			}
		}
		out = append(out, one)
	}
	return out
}

// RuntimeOf translates the runtime that a client states.
func RuntimeOf(w *wire.Runtime, fds []*os.File) runtimes.Ref {
	if w == nil {
		return runtimes.Ref{}
	}
	ref := runtimes.Ref{Directory: w.Directory, ORTVersion: w.OrtVersion, ORTLibrary: w.OrtLibrary}
	for _, l := range w.EpLibraries {
		one := runtimes.LibraryRef{EP: l.Ep, Path: l.Path, Complete: l.Complete}
		if l.Fd != nil && int(*l.Fd) < len(fds) {
			one.File = fds[*l.Fd]
		}
		for _, x := range l.Beside {
			if one.Beside == nil {
				one.Beside = make(map[string]*os.File, len(l.Beside))
			}
			if int(x.Fd) < len(fds) {
				one.Beside[x.Location] = fds[x.Fd]
			}
		}
		ref.EPLibraries = append(ref.EPLibraries, one)
	}
	return ref
}
