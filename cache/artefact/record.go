package artefact

import (
	"fmt"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
)

// members lists what a group consists of, nil for a single model.
func members(at *request.Attempt, result compilers.Result) []index.Member {
	if at.Models() == 1 {
		return nil
	}
	var out []index.Member
	for i, graph := range result.Graphs {
		out = append(out, index.Member{ModelName: at.Request.ModelFiles(i).Name, ModelDigest: at.Plan.Canonical.ModelOf(i), Graph: graph,
			SessionOptions: compilers.ShareOptions(), AloneKey: at.Plan.Canonical.Alone(i)})
	}
	return out
}

// groupWarnings tells of a group that shares nothing.
func groupWarnings(models []*epmodel.Model) []string {
	if len(models) < 2 {
		return nil
	}
	users := make(map[string]int) // of each file, graphs that refer to it
	for _, m := range models {
		seen := make(map[string]bool)
		for _, ref := range m.Sidecars() {
			if !seen[ref.Name] {
				seen[ref.Name] = true
				users[ref.Name]++
			}
		}
	}
	for _, n := range users {
		if n == len(models) {
			return nil
		}
	}
	return []string{"no context binary is shared by all models of the group: the execution provider made them apart"}
}

// NewBuild is the build's record but for its files' digests. open are dimensions of the models' inputs.
func NewBuild(at *request.Attempt, scope string, models []*epmodel.Model, result compilers.Result,
	open []request.OpenDimension, created time.Time) *index.Build {
	r, p, m := at.Request, at.Plan, models[0]
	b := &index.Build{
		RequestKey: p.RequestKey, BuildKey: p.BuildKey, Scope: scope, UID: r.Peer.UID,
		ModelDigest: p.Canonical.Model, ModelName: r.Name, Record: p.Record, RecordJSON: p.RecordJSON,
		EPs: p.Stated(models), ORTVersion: result.ORTVersion,
		Route: p.Canonical.Route, Graph: result.Graph,
		ProviderOptions: make(map[string]map[string]string), SessionOptions: r.SessionOptions,
		CompileSeconds: result.Seconds, Created: created, IRVersion: m.IRVersion, Embed: r.Embed,
	}
	for _, name := range result.Files {
		b.Files = append(b.Files, index.File{Name: name})
	}
	for _, ep := range p.EPs {
		info, _ := compilers.EPByName(ep.Name)
		b.ProviderOptions[ep.Name] = identity.BaseNames(info, ep.Options)
	}
	b.Members = members(at, result)
	for i, m := range models {
		whose := ""
		if len(models) > 1 {
			whose = fmt.Sprintf("model %q: ", r.ModelFiles(i).Name)
		}
		b.IRVersion = max(b.IRVersion, m.IRVersion)
		for _, warning := range p.Untaken(m, open) {
			b.Warnings = append(b.Warnings, whose+warning)
		}
	}
	b.Warnings = append(b.Warnings, groupWarnings(models)...)
	return b
}
