package main

import (
	"fmt"
	"os"
	"strings"

	"google.golang.org/protobuf/proto"

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
		return nil, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: "the request has no descriptor of a model"}
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

func acquireReply(a *cache.Answer) *wire.AcquireReply {
	reply := &wire.AcquireReply{
		Outcome: a.Outcome, ModelDigest: a.ModelDigest.String(), Compatibility: a.Compatibility.Verdict.String(),
		CompatibilitySource: a.Compatibility.Source, CompatibilityReason: valid(a.Compatibility.Reason), Why: valid(a.Why), Record: a.Record,
		Runtime: a.Runtime, Job: a.Job, Warnings: a.Warnings, View: a.Path, Graph: a.Graph,
		SessionOptions: a.SessionOptions, GraphOptimizationLevel: a.GraphOptimizationLevel,
	}
	reply.RequestKey = keyText(a.RequestKey)
	if a.Claim != nil {
		reply.Claim = claimReply(a.Claim)
	}
	if a.Explanation != nil {
		reply.Explanation = explanationReply(a.Explanation, maxReply-proto.Size(reply))
	}
	if a.ProviderOptions != nil {
		reply.ProviderOptions = make(map[string]*wire.StringMap, len(a.ProviderOptions))
		for ep, options := range a.ProviderOptions {
			reply.ProviderOptions[ep] = &wire.StringMap{Entries: options}
		}
	}
	reply.Member = uint32(a.Member)
	for _, m := range a.Members {
		reply.Members = append(reply.Members, &wire.Member{Name: m.Name, ModelDigest: m.ModelDigest.String(), Graph: m.Graph, SessionOptions: m.SessionOptions})
	}
	if b := a.Build; b != nil {
		reply.Build, reply.CompileSeconds = b.BuildKey.String(), b.CompileSeconds
		ep := b.Maker()
		reply.Ep, reply.SdkVersion, reply.HardwareArchitecture = ep.Name, ep.SDKVersion, ep.HardwareArchitecture
		id, _, _ := strings.Cut(a.Graph, "/")
		for _, f := range b.Files {
			one := &wire.File{Name: id + "/" + f.Name, Size: f.Size}
			if !f.Digest.IsZero() { // else nobody made one
				one.Digest = f.Digest.String()
			}
			reply.Files = append(reply.Files, one)
		}
		reply.Unkept = a.Unkept
	}
	return reply
}

func buildReply(l *cache.Listing) *wire.Build {
	b := &l.Build
	out := &wire.Build{
		Build: b.BuildKey.String(), RequestKey: b.RequestKey.String(), ModelDigest: b.ModelDigest.String(), ModelName: b.ModelName,
		OrtVersion: b.ORTVersion, Scope: b.Scope, Graph: b.Graph, CreatedMs: b.Created.UnixMilli(), Hits: l.Hits,
		CompileSeconds: b.CompileSeconds, State: l.State.Name, Reason: l.State.Reason, LoadCheck: b.LoadCheck,
		VerifiedOutput: b.VerifiedOutput, LoadSeconds: l.Gain.Load, SourceLoadSeconds: l.Gain.SourceLoad,
		Pinned: l.Pinned, OwnBytes: l.Own, KeptAs: l.KeptAs, KeptText: valid(l.KeptText),
	}
	if j := l.Judgement; j.Source != "" || j.Reason != "" { // else nobody judged it
		out.Compatibility, out.CompatibilitySource, out.CompatibilityReason = j.Verdict.String(), j.Source, valid(j.Reason)
		out.CompatibilityRuntime, out.JudgedMs = j.Runtime, milliseconds(j.At)
	}
	if b.Put {
		out.MadeBy = fmt.Sprintf("uid %d", b.UID)
	}
	if !b.Converted.ID.IsZero() {
		out.ConvertedFrom = b.Converted.BuildKey.String()
	}
	out.LastUsedMs = milliseconds(l.LastUsed)
	if l.Leased {
		out.Leases = 1
	}
	if len(b.EPs) > 0 {
		ep := b.EPs[0]
		out.Ep, out.EpVersion, out.EpLibraryDigest = ep.Name, ep.Version, ep.LibraryDigest.String()
		out.SdkVersion, out.HardwareArchitecture, out.CompatibilityString = ep.SDKVersion, ep.HardwareArchitecture, ep.CompatibilityString
		out.DriverVersion = ep.DriverVersion
	}
	for _, f := range b.Files {
		out.Files = append(out.Files, &wire.File{Name: f.Name, Size: f.Size, Digest: f.Digest.String()})
	}
	for _, m := range b.Members {
		out.Members = append(out.Members, &wire.Member{Name: m.ModelName, ModelDigest: m.ModelDigest.String(), Graph: m.Graph, SessionOptions: m.SessionOptions})
	}
	return out
}

func runtimeReply(f *cache.RuntimeFacts) *wire.RuntimeFacts {
	out := &wire.RuntimeFacts{
		Directory: f.Name, OrtVersion: f.Spec.ORTVersion, OrtLibrary: f.Spec.ORTLibrary, Error: f.Error,
		ProbedMs: f.At.UnixMilli(), Registered: f.Registered, State: f.State, Watched: f.Watched, Changes: f.Changes,
		OrtBuild: f.Facts.ORTBuild,
	}
	if !f.Previous.IsZero() {
		out.PreviousMs = f.Previous.UnixMilli()
	}
	if f.Facts.ORTVersion != "" {
		out.OrtVersion = f.Facts.ORTVersion
	}
	for _, ep := range f.Facts.EPs {
		mark, marked := f.Marks[ep.Name]
		one := &wire.EpFacts{Name: ep.Name, Library: ep.Library, LibraryDigest: f.Digests[ep.Name], Version: mark.EPVersion, Error: ep.Error}
		one.DriverVersion, one.DriverSource = f.Drivers[ep.Name].Version, f.Drivers[ep.Name].Source
		for i, d := range ep.Devices {
			dev := &wire.DeviceFacts{Type: d.Type, VendorId: d.VendorID, Vendor: d.Vendor, DeviceId: d.DeviceID,
				EpMetadata: d.EPMetadata, DeviceMetadata: d.DeviceMetadata}
			if i == 0 && marked {
				dev.SdkVersion, dev.HardwareArchitecture = mark.SDKVersion, mark.Hardware()
				dev.CompatibilityString = mark.CompatibilityString
			}
			if i == 0 {
				dev.Error = f.MarkErrors[ep.Name]
			}
			one.Devices = append(one.Devices, dev)
		}
		out.Eps = append(out.Eps, one)
	}
	return out
}
