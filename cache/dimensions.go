package cache

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/epmodel"
)

// openDimension is a dimension of a model's inputs that neither the model nor the request gives a size.
type openDimension struct {
	name, denotation string   // by which a request could; both may be empty
	inputs           []string // that have it
}

// openDimensions lists them in the order of the inputs, those of one name once.
func (r *Request) openDimensions(m *epmodel.Model) []openDimension {
	var out []openDimension
	fixed, err := identity.Denotations(r.FreeDimensionsByDenotation)
	if err != nil {
		fixed = nil // such a request is refused, and never gets here
	}
	for _, in := range m.Inputs {
		for _, d := range in.Shape {
			_, named := r.FreeDimensions[d.Param]
			_, meant := fixed[strings.ToLower(d.Denotation)]
			if d.Value >= 0 || d.Param != "" && named || d.Denotation != "" && meant {
				continue
			}
			at := slices.IndexFunc(out, func(o openDimension) bool { return o.name == d.Param && o.denotation == d.Denotation })
			if at < 0 {
				at = len(out)
				out = append(out, openDimension{name: d.Param, denotation: d.Denotation})
			}
			if !slices.Contains(out[at].inputs, in.Name) {
				out[at].inputs = append(out[at].inputs, in.Name)
			}
		}
	}
	return out
}

// maxNamedDimensions bounds what a message says.
const maxNamedDimensions = 8

// dimensionsHint says which dimensions to fix, and how: execution providers that need to know every shape take little or nothing else.
func dimensionsHint(open []openDimension) string {
	var what, how []string
	for i, d := range open {
		if i == maxNamedDimensions {
			what = append(what, fmt.Sprintf("%d more", len(open)-i))
			break
		}
		of := " of " + spelledNames(d.inputs)
		name, denotation := spelledName(d.name), spelledName(d.denotation)
		switch {
		case d.name != "":
			what, how = append(what, name+of), append(how, "--dim "+name+"=N")
		case d.denotation != "":
			what, how = append(what, denotation+of), append(how, "--dim-by-denotation "+denotation+"=N")
		default:
			what = append(what, "a dimension without a name"+of+", which only the model's author can fix")
		}
	}
	hint := "the model leaves dimensions open, which the execution provider may need to know: " + strings.Join(what, ", ")
	if len(how) > 0 {
		hint += "; fix them: " + strings.Join(how, " ")
	}
	return hint
}

// addDimensions notes what the inputs of one of the job's models have; what another leaves open too is the same to whoever fixes it.
func (w *workspace) addDimensions(m *epmodel.Model) {
	for _, d := range w.of.openDimensions(m) {
		if !slices.ContainsFunc(w.open, func(o openDimension) bool { return o.name == d.name && o.denotation == d.denotation }) {
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

// spelledName gives a name that a model chose as it can be told, and typed: plain ones as they are, others in quotes.
func spelledName(name string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-.:/", r)
	}
	name = identity.Shortened(name)
	if strings.IndexFunc(name, func(r rune) bool { return !plain(r) }) < 0 {
		return name
	}
	return strconv.Quote(name)
}

// spelledNames lists names, the first few of them.
func spelledNames(names []string) string {
	var list []string
	for i, name := range names {
		if i == maxNamedDimensions {
			list = append(list, fmt.Sprintf("%d more", len(names)-i))
			break
		}
		list = append(list, strconv.Quote(identity.Shortened(name)))
	}
	return strings.Join(list, " and ")
}

// aboutDimensions adds the hint to a failure that open dimensions may be the cause of: the execution provider refused the model, or took nothing of it.
func (j *job) aboutDimensions(f *failure.Failure) {
	if f.Reason != failure.NoNode && f.Reason != failure.Refused {
		return
	}
	if vain := j.fixedInVain(); len(vain) > 0 {
		f.AddHint("no input of the model has a free dimension " + spelledNames(vain))
	}
	if len(j.open) == 0 {
		return
	}
	var names []string
	for _, d := range j.open {
		if d.name != "" {
			names = append(names, spelledName(d.name))
		}
	}
	f.AddHint(dimensionsHint(j.open))
	f.Facts["free_dimensions"] = strings.Join(names, ",")
}
