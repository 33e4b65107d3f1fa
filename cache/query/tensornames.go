package query

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/weights"
)

// Names of tensors are found when they are requested, and are not stored: so stored files do not depend
// on them, the newest reader finds them, and other requests do not pay for them. A file that names its
// tensors is believed. In other files the weights of the source model are searched, if it still is the
// model that was compiled.

type names struct {
	of    cas.Digest // the model, or the group
	index *weights.Index
	model string // its name, or those of the group
	err   error
}

func (k *kinship) nameRanges(ctx context.Context, f *LaidFile) ([]epmodel.Named, error) {
	source, err := k.q.forms.Look(f.Digest)
	if err != nil {
		return nil, err
	}
	defer source.Close() // read-only: nothing can be lost
	if f.Name != f.Build.Graph && !slices.ContainsFunc(f.Build.Members, func(m index.Member) bool { return m.Graph == f.Name }) {
		return k.nameBinary(ctx, f, source, epmodel.Range{Length: f.Size})
	}
	m, err := epmodel.Read(ctx, f.Name, source)
	if err != nil {
		return nil, err
	}
	all := m.NamedRanges()
	for _, c := range m.Contexts {
		if c.Inline.Length == 0 {
			continue
		}
		inside, err := k.nameBinary(ctx, f, source, c.Inline)
		if err != nil {
			return nil, err
		}
		all = append(all, inside...)
	}
	if len(all) == 0 {
		f.Unknown = "this graph has no tensors: the files beside it have them"
	}
	epmodel.SortNamed(all)
	return all[:min(len(all), maxNames)], nil
}

const maxNames = 1 << 16

// nameBinary names the ranges of a context binary. Names that do not fit are ignored.
func (k *kinship) nameBinary(ctx context.Context, f *LaidFile, source epmodel.Source, within epmodel.Range) ([]epmodel.Named, error) {
	all, err := epmodel.NamedRanges(ctx, f.Name, epmodel.Within(source, within))
	var format *epmodel.FormatError
	if err != nil && !errors.As(err, &format) {
		return nil, err
	}
	for i := range all {
		all[i].Offset += within.Offset
	}
	if slices.ContainsFunc(all, func(n epmodel.Named) bool { return n.Kind == epmodel.TensorKind }) {
		return all, nil
	}
	model, missing := k.weightsOf(ctx, &f.Build)
	if missing == nil {
		var found []epmodel.Named
		if found, missing = model.index.Find(ctx, source, within); missing == nil && len(found) > 0 {
			f.NamedBy = model.model
			all = append(all, found...)
			epmodel.SortNamed(all)
			return all, nil
		}
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	switch {
	case err != nil:
		f.Unknown = err.Error()
	case missing != nil:
		f.Unknown = fmt.Sprintf("this kind of file does not name its tensors, and they cannot be looked for: %v", missing)
	default:
		f.Unknown = "this kind of file does not name its tensors, and none of the source model's stands in it in a form that is known"
	}
	return all, nil
}

// weightsOf returns a build's weights. One caller reads at a time, and the latest are kept.
func (k *kinship) weightsOf(ctx context.Context, b *index.Build) (*names, error) {
	if k.names != nil && k.names.of == b.ModelDigest {
		return k.names, k.names.err
	}
	k.names = nil // so that there is room for these
	select {
	case k.q.naming <- struct{}{}:
		defer func() { <-k.q.naming }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	one := &names{of: b.ModelDigest}
	if one.err = one.read(ctx, k.q, b); ctx.Err() != nil {
		return nil, ctx.Err()
	}
	k.names = one
	return one, one.err
}

func (n *names) read(ctx context.Context, q *Queries, b *index.Build) error {
	sources, err := q.options.Sources(ctx, b)
	if err != nil {
		return err
	}
	defer identity.Close(sources...)
	var models []weights.Model
	var called []string
	for _, one := range sources {
		graph, err := epmodel.FileSource(one.Graph)
		if err != nil {
			return err
		}
		m := weights.Model{Graph: graph, External: make(map[string]epmodel.Source)}
		if m.Model, err = epmodel.Read(ctx, one.Name, graph); err != nil {
			return err
		}
		for location, f := range one.External {
			if m.External[location], err = epmodel.FileSource(f); err != nil {
				return err
			}
		}
		models, called = append(models, m), append(called, cmp.Or(one.Name, "its source model"))
	}
	n.model = strings.Join(called, ", ")
	n.index, err = weights.NewIndex(ctx, models...)
	return err
}

func namedBytes(all []epmodel.Named) (sum int64) {
	end := int64(0)
	for _, n := range all {
		if n.Kind == epmodel.TensorKind && n.Offset+n.Length > end {
			sum += n.Offset + n.Length - max(n.Offset, end)
			end = n.Offset + n.Length
		}
	}
	return sum
}
