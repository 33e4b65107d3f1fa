package build

import (
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/request"
)

// aboutDimensions adds the hint to a failure that open dimensions may be the cause of: the
// execution provider refused the model, or took nothing of it.
func (j *Job) aboutDimensions(f *failure.Failure) {
	if f.Reason != failure.NoNode && f.Reason != failure.Refused {
		return
	}
	if vain := j.FixedInVain(); len(vain) > 0 {
		f.AddHint("no input of the model has a free dimension " + request.SpelledNames(vain))
	}
	if len(j.Open) == 0 {
		return
	}
	var names []string
	for _, d := range j.Open {
		if d.Name != "" {
			names = append(names, request.SpelledName(d.Name))
		}
	}
	f.AddHint(request.DimensionsHint(j.Open))
	f.Facts["free_dimensions"] = strings.Join(names, ",")
}
