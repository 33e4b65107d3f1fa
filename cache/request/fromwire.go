package request

import (
	"os"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

var onMiss = map[wire.OnMiss]OnMiss{
	wire.OnMiss_WAIT: Wait, wire.OnMiss_FAIL: Fail, wire.OnMiss_REFRESH: Refresh,
	wire.OnMiss_BYPASS: Bypass, wire.OnMiss_KEY_ONLY: KeyOnly, wire.OnMiss_EXPLAIN: Explain,
	wire.OnMiss_BACKGROUND: Background, wire.OnMiss_CLAIM: ForClaim,
}

// FromWire translates a message of the protocol, whose indices are within the descriptors.
func FromWire(p Peer, w *wire.Acquire, fds []*os.File) (*Request, error) {
	miss, ok := onMiss[w.OnMiss]
	if !ok {
		return nil, apierr.New(apierr.Version, nil, "on_miss %s is not supported by this version", w.OnMiss).
			WithHint("use wait, background, fail, refresh, bypass, key_only or explain")
	}
	if w.Model == nil || int(w.Model.Fd) >= len(fds) {
		return nil, apierr.New(apierr.BadRequest, nil, "the request has no descriptor of a model")
	}
	model := modelFiles([]*wire.Model{w.Model}, fds)[0]
	r := &Request{
		Peer: p, Name: model.Name, Graph: model.Graph, External: model.External, Group: modelFiles(w.Group, fds),
		SessionOptions: w.SessionOptions,
		FreeDimensions: w.FreeDimensions, FreeDimensionsByDenotation: w.FreeDimensionsByDenotation,
		GraphOptimizationLevel: w.GraphOptimizationLevel, Embed: w.Embed, Route: w.Route,
		Runtime: RuntimeOf(w.Runtime, fds), StrictORT: w.StrictOrt, VerifyOutput: w.VerifyOutput,
		OnMiss: miss, Store: w.Store, KeepGoing: w.KeepGoing, HoldsView: w.HoldsView, Adopt: w.Adopt,
		Output: identity.Output{InitializersFile: w.Output.GetExternalInitializersFile(),
			InitializersThreshold: w.Output.GetExternalInitializersThreshold(),
			InitializersInSource:  w.Output.GetKeepInitializersInSource(),
			NodeNamePrefix:        w.Output.GetNodeNamePrefix(), Complete: w.Output.GetComplete()},
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

// RuntimeOf translates what a client says of the runtime that it loads with.
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
