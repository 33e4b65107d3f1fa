package main

import (
	"os"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/requests"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// acquireRequest translates the request; the socket has checked that every index is within the descriptors.
func acquireRequest(p cache.Peer, w *wire.Acquire, fds []*os.File) (*cache.Request, error) {
	miss, ok := onMiss[w.OnMiss]
	if !ok {
		return nil, &unixsock.Error{Class: wire.ErrorClass_VERSION, Text: "on_miss " + w.OnMiss.String() + " is not supported by this version",
			Hint: "use wait, background, fail, refresh, bypass, key_only or explain"}
	}
	if w.Model == nil || int(w.Model.Fd) >= len(fds) {
		return nil, badRequest("the request has no descriptor of a model")
	}
	r := &cache.Request{
		Peer: p, Name: w.Model.Name, Graph: fds[w.Model.Fd], External: make(map[string]*os.File, len(w.Model.External)),
		SessionOptions: w.SessionOptions, FreeDimensions: w.FreeDimensions, FreeDimensionsByDenotation: w.FreeDimensionsByDenotation,
		GraphOptimizationLevel: w.GraphOptimizationLevel, Embed: w.Embed, Route: w.Route,
		Runtime: runtimeRef(w.Runtime, fds), StrictORT: w.StrictOrt, VerifyOutput: w.VerifyOutput, OnMiss: miss, Store: w.Store, KeepGoing: w.KeepGoing, HoldsView: w.HoldsView,
		Adopt: w.Adopt,
		Output: requests.Output{InitializersFile: w.Output.GetExternalInitializersFile(), InitializersThreshold: w.Output.GetExternalInitializersThreshold(),
			InitializersInSource: w.Output.GetKeepInitializersInSource(), NodeNamePrefix: w.Output.GetNodeNamePrefix(), Complete: w.Output.GetComplete()},
	}
	for _, x := range w.Model.External {
		r.External[x.Location] = fds[x.Fd]
	}
	r.Group = modelFiles(w.Group, fds)
	for _, ep := range w.Eps {
		one := requests.EP{Name: ep.Name, Options: ep.Options}
		for _, d := range ep.Devices {
			one.Devices = append(one.Devices, compilers.Device{Type: d.Type, VendorID: d.VendorId, DeviceID: d.DeviceId, Metadata: d.Metadata})
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

// modelFiles translates the further models of a group.
func modelFiles(group []*wire.Model, fds []*os.File) []cache.ModelFiles {
	var out []cache.ModelFiles
	for _, m := range group {
		one := cache.ModelFiles{Name: m.Name, External: make(map[string]*os.File, len(m.External))}
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

func runtimeRef(w *wire.Runtime, fds []*os.File) cache.RuntimeRef {
	if w == nil {
		return cache.RuntimeRef{}
	}
	ref := cache.RuntimeRef{Directory: w.Directory, ORTVersion: w.OrtVersion, ORTLibrary: w.OrtLibrary}
	for _, l := range w.EpLibraries {
		one := cache.EPLibraryRef{EP: l.Ep, Path: l.Path, Complete: l.Complete}
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
