package request

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/epmodel"
)

// OpenDimension is a dimension of a model's inputs that neither the model nor the request gives a size.
type OpenDimension struct {
	Name, Denotation string   // by which a request could; both may be empty
	inputs           []string // that have it
}

// OpenDimensions lists them in the order of the inputs, those of one name once.
func (r *Request) OpenDimensions(m *epmodel.Model) []OpenDimension {
	var out []OpenDimension
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
			at := slices.IndexFunc(out, func(o OpenDimension) bool { return o.Name == d.Param && o.Denotation == d.Denotation })
			if at < 0 {
				at = len(out)
				out = append(out, OpenDimension{Name: d.Param, Denotation: d.Denotation})
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

// DimensionsHint says which dimensions to fix, and how: execution providers that need to know every
// shape take little or nothing else.
func DimensionsHint(open []OpenDimension) string {
	var what, how []string
	for i, d := range open {
		if i == maxNamedDimensions {
			what = append(what, fmt.Sprintf("%d more", len(open)-i))
			break
		}
		of := " of " + SpelledNames(d.inputs)
		name, denotation := SpelledName(d.Name), SpelledName(d.Denotation)
		switch {
		case d.Name != "":
			what, how = append(what, name+of), append(how, "--dim "+name+"=N")
		case d.Denotation != "":
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

// SpelledName gives a name that a model chose as it can be told, and typed: plain ones as they are,
// others in quotes.
func SpelledName(name string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-.:/", r)
	}
	name = identity.Shortened(name)
	if strings.IndexFunc(name, func(r rune) bool { return !plain(r) }) < 0 {
		return name
	}
	return strconv.Quote(name)
}

// SpelledNames lists names, the first few of them.
func SpelledNames(names []string) string {
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
