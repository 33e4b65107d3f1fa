package lookup

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/cache/request"
)

// Finish fills in what every answer with a build says. It returns nil for no answer.
func (l *Lookup) Finish(a *request.Answer, at *request.Attempt) *request.Answer {
	if a == nil {
		return nil
	}
	a.RequestKey, a.ModelDigest, a.Record = at.Plan.RequestKey, at.Plan.Canonical.Model, at.Plan.RecordJSON
	a.Runtime, a.SessionOptions = at.RuntimeName, at.SessionOptions
	a.GraphOptimizationLevel = at.Plan.Canonical.GraphOptimizationLevel // of a claim: to compile with
	if a.Build != nil {
		a.SessionOptions = a.Build.SessionOptions
		a.GraphOptimizationLevel = cmp.Or(a.Compatibility.Level, a.Build.GraphOptimizationLevel)
		a.Warnings = append(a.Warnings, a.Build.Warnings...)
		if l.o.Warnings != nil {
			a.Warnings = append(a.Warnings, l.o.Warnings(a.Build.ID)...)
		}
		a.TellMembers(at.Request, at.Plan.Canonical.Model)
		l.o.Rights.Saw(at.Peer, a.Build)
	}
	for _, name := range slices.Sorted(maps.Keys(at.FreeDimensions)) {
		if !slices.Contains(at.Identity.FreeDims, name) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("no input of the model has a free dimension %q; %s",
				name, namedDimensions(at.Identity.FreeDims)))
		}
	}
	a.ProviderOptions = make(map[string]map[string]string, len(at.EPs))
	for _, ep := range at.Plan.EPs {
		a.ProviderOptions[ep.Name] = ep.Options
	}
	return a
}

// namedDimensions lists the free dimensions of a model's inputs, for people.
func namedDimensions(names []string) string {
	if len(names) == 0 {
		return "none of them is free"
	}
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = strconv.Quote(name)
	}
	return "they have " + strings.Join(quoted, ", ")
}
