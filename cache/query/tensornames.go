package query

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
)

// Names of tensors are found when they are requested, and are not stored: so stored files do not
// depend on them, the newest reader finds them, and other requests do not pay for them. A file that
// names its tensors is believed.

func (q *Queries) nameRanges(ctx context.Context, f *LaidFile) ([]epmodel.Named, error) {
	source, err := q.forms.Look(f.Digest)
	if err != nil {
		return nil, err
	}
	defer source.Close() // read-only: nothing can be lost
	if f.Name != f.Build.Graph && !slices.ContainsFunc(f.Build.Members, func(m index.Member) bool { return m.Graph == f.Name }) {
		return q.nameBinary(ctx, f, source, epmodel.Range{Length: f.Size})
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
		inside, err := q.nameBinary(ctx, f, source, c.Inline)
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
func (q *Queries) nameBinary(ctx context.Context, f *LaidFile, source epmodel.Source, within epmodel.Range) ([]epmodel.Named, error) {
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
	if f.Unknown = "this kind of file does not name its tensors"; err != nil {
		f.Unknown = err.Error()
	}
	return all, nil
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
