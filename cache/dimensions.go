package cache

import (
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/epmodel"
)

// addDimensions notes what the inputs of one of the job's models have; what another leaves open too is the same to whoever fixes it.
func (w *workspace) addDimensions(m *epmodel.Model) {
	for _, d := range w.of.OpenDimensions(m) {
		if !slices.ContainsFunc(w.open, func(o request.OpenDimension) bool { return o.Name == d.Name && o.Denotation == d.Denotation }) {
			w.open = append(w.open, d)
		}
	}
	w.dimensions = append(w.dimensions, identity.FreeDimensions(m)...)
}

// fixedInVain lists the dimensions that the request fixes and no input of the models has: ONNX Runtime says nothing of them.
func (w *workspace) fixedInVain() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(w.of.FreeDimensions)) {
		if !slices.Contains(w.dimensions, name) {
			names = append(names, name)
		}
	}
	return names
}

// aboutDimensions adds the hint to a failure that open dimensions may be the cause of: the execution provider refused the model, or took nothing of it.
func (j *job) aboutDimensions(f *failure.Failure) {
	if f.Reason != failure.NoNode && f.Reason != failure.Refused {
		return
	}
	if vain := j.fixedInVain(); len(vain) > 0 {
		f.AddHint("no input of the model has a free dimension " + request.SpelledNames(vain))
	}
	if len(j.open) == 0 {
		return
	}
	var names []string
	for _, d := range j.open {
		if d.Name != "" {
			names = append(names, request.SpelledName(d.Name))
		}
	}
	f.AddHint(request.DimensionsHint(j.open))
	f.Facts["free_dimensions"] = strings.Join(names, ",")
}
