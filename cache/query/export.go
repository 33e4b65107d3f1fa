package query

import (
	"context"
	"encoding/json"
	"os"
	"slices"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/unixsock/wire"
)

// Export returns the exported description of one build, and a lease on its view. Only the owner may
// export a private build, not an administrator.
func (q *Queries) Export(ctx context.Context, p rights.Peer, name string) (*wire.ExportReply,
	*os.File, error) {
	builds, err := q.Find(ctx, p, []string{name})
	if err != nil {
		return nil, nil, err
	}
	slices.SortStableFunc(builds, func(a, b index.Build) int {
		return b.Created.Compare(a.Created)
	})
	why := error(nil)
	for i := range builds {
		if why = q.mayExport(p, &builds[i]); why == nil {
			return q.export(ctx, &builds[i])
		}
	}
	return nil, nil, why
}

// ExportShared is Export for a shared build.
func (q *Queries) ExportShared(ctx context.Context, b *index.Build) (*wire.ExportReply,
	*os.File, error) {
	if err := q.mayExport(rights.Peer{UID: q.options.UID}, b); err != nil {
		return nil, nil, err
	}
	return q.export(ctx, b)
}

func (q *Queries) mayExport(p rights.Peer, b *index.Build) error {
	refused := func(class apierr.Class, text string, args ...any) error {
		return apierr.New(class, nil, "build %.16s of model %q: "+text,
			append([]any{b.BuildKey, b.ModelName}, args...)...)
	}
	state := q.index.Journal.StateOf(b.ID)
	switch {
	case b.Scope != rights.Shared && b.Scope != rights.OwnScope(p):
		return refused(apierr.NotAllowed, "it is private to %s, and only that user may export it",
			b.Scope)
	case state.Name == index.Withheld || state.Name == index.Damaged:
		return refused(apierr.Stale, "it is %s: %s", state.Name, state.Reason)
	case b.BuildKey != identity.BuildKey(b.RequestKey, b.EPs, b.Route):
		return refused(apierr.BadRequest, "it was compiled with libraries of an application, "+
			"so that no request on another machine would find it")
	case len(b.Files) > portable.MaxFiles:
		return refused(apierr.BadRequest, "it has %d files, more than %d", len(b.Files),
			portable.MaxFiles)
	}
	return nil
}

func (q *Queries) export(ctx context.Context, b *index.Build) (*wire.ExportReply, *os.File, error) {
	c := portableConfig(b)
	err := q.addSketches(ctx, c, b)
	if err != nil {
		return nil, nil, apierr.New(apierr.Unavailable, err, "build %.16s of model %q", b.BuildKey,
			b.ModelName)
	}
	config, err := json.Marshal(c)
	if err != nil {
		return nil, nil, apierr.New(apierr.Internal, err, "export")
	}
	a, err := lookup.Lease(ctx, q.store, b, func(string) {})
	if err != nil {
		return nil, nil, apierr.New(apierr.Unavailable, err, "build %.16s of model %q", b.BuildKey,
			b.ModelName)
	}
	reply := &wire.ExportReply{Config: config, Graph: a.Graph, ModelName: wire.Clip(b.ModelName),
		CreatedMs: wire.Milliseconds(b.Compiled()), CompileSeconds: b.CompileSeconds}
	for _, f := range b.Files {
		reply.Files = append(reply.Files,
			&wire.File{Name: f.Name, Size: f.Size, Digest: f.Digest.String()})
	}
	for i := range b.EPs {
		if compilers.IsMachineClass(b.EPs[i].HardwareArchitecture) {
			reply.MachineClass = b.EPs[i].HardwareArchitecture
		}
	}
	return reply, a.View, nil
}

// portableConfig returns the part of a build's manifest that is exported.
func portableConfig(b *index.Build) *portable.Config {
	c := &portable.Config{BuildKey: portable.Hash(b.BuildKey),
		ModelDigest: portable.Hash(b.ModelDigest),
		Record:      b.Record, ORTVersion: b.ORTVersion, Route: b.Route, Graph: b.Graph,
		Level: b.GraphOptimizationLevel, IRVersion: b.IRVersion, Embed: b.Embed}
	for _, ep := range b.EPs {
		c.EPs = append(c.EPs, portable.EP{Name: ep.Name, Version: ep.Version,
			LibraryDigest: portable.Hash(ep.LibraryDigest), SDKVersion: ep.SDKVersion,
			Hardware: ep.HardwareArchitecture, CompatibilityString: ep.CompatibilityString,
			DriverVersion: ep.DriverVersion, Devices: ep.Devices, TookNone: ep.TookNone})
	}
	for _, m := range b.Members {
		c.Members = append(c.Members, portable.Member{ModelDigest: portable.Hash(m.ModelDigest),
			Graph: m.Graph, Alone: m.AloneKey != index.RequestKey{}})
	}
	return c
}

// addSketches adds the sketches of the large files.
func (q *Queries) addSketches(ctx context.Context, c *portable.Config, b *index.Build) error {
	for i, f := range b.Files[:min(len(b.Files), portable.MaxSketched)] {
		if f.Size < portable.ChunkedFrom {
			continue
		}
		sketch, err := q.store.Packing().Sharing.Sketch(ctx, f.Digest)
		if err != nil {
			return err
		}
		c.Sketches = append(c.Sketches, make([][]byte, i+1-len(c.Sketches))...)
		c.Sketches[i] = sketch
	}
	return nil
}
