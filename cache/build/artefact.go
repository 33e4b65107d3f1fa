package build

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
)

// ReadOutput reads the compiled graph, or those of a group in order, and checks that the result has
// every file that the graphs and context binaries refer to, because EPs do not check that when they
// load. used has the names of the referenced files.
func ReadOutput(ctx context.Context, out string, result compilers.Result) (
	models []*epmodel.Model, used map[string]bool, err error) {
	sizes := make(map[string]int64, len(result.Files))
	for _, name := range result.Files {
		info, err := os.Stat(filepath.Join(out, filepath.FromSlash(name)))
		if err != nil {
			return nil, nil, err
		}
		sizes[name] = info.Size()
	}
	graphs := result.Graphs
	if len(graphs) == 0 {
		graphs = []string{result.Graph}
	}
	used = make(map[string]bool)
	note := func(refs []epmodel.Reference) {
		for _, r := range refs {
			used[r.File()] = true
		}
	}
	binary := func(name string, bin epmodel.Source) error {
		refs, err := epmodel.BinaryReferences(name, bin)
		if err != nil {
			return err
		}
		note(refs)
		return epmodel.ValidateReferences(name, refs, sizes)
	}
	opened := workspace.OpenFiles{}
	defer opened.Close()
	for _, name := range graphs {
		graph, err := opened.Source(filepath.Join(out, name))
		if err != nil {
			return nil, nil, err
		}
		m, err := epmodel.Read(ctx, name, graph)
		if err == nil {
			err = epmodel.Validate(m, sizes)
		}
		if err != nil {
			return nil, nil, err
		}
		compilers.NameSources(m)
		note(m.Sidecars())
		for _, node := range m.Contexts {
			if node.Inline.Length > 0 {
				if err := binary(name, node.Open(graph)); err != nil {
					return nil, nil, err
				}
			}
		}
		models = append(models, m)
	}
	for _, name := range result.Files {
		if slices.Contains(graphs, name) {
			continue
		}
		bin, err := opened.Source(filepath.Join(out, filepath.FromSlash(name)))
		if err == nil {
			err = binary(name, bin)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	return models, used, nil
}

// SuitsOutput compares the files of initializers that a graph refers to with the requested ones.
// The error says what differs.
func SuitsOutput(o *identity.RecordOutput, m *epmodel.Model) error {
	for _, location := range m.Locations() {
		switch {
		case o == nil:
			return fmt.Errorf("initializers are in the file %q, and the request was for "+
				"none", location)
		case !o.InitializersInSource && location != o.InitializersFile:
			return fmt.Errorf("initializers are in the file %q, and the request was for "+
				"%q", location, o.InitializersFile)
		}
	}
	return nil
}

// CheckComplete fails for a graph that leaves nodes to the CPU if the request forbids that.
func CheckComplete(c *identity.Record, m *epmodel.Model) error {
	if rest := m.Nodes - len(m.Contexts); rest > 0 &&
		c.SessionOptions["session.disable_cpu_ep_fallback"] == "1" {
		return fmt.Errorf("%d nodes are left to other execution providers, and the request was "+
			"for none", rest)
	}
	return nil
}

// members lists the members of a group, nil for a single model.
func members(at *request.Attempt, result compilers.Result) []index.Member {
	if at.Models() == 1 {
		return nil
	}
	var out []index.Member
	for i, graph := range result.Graphs {
		out = append(out, index.Member{ModelName: at.Request.ModelFiles(i).Name,
			ModelDigest: at.Plan.Canonical.ModelOf(i), Graph: graph,
			SessionOptions: compilers.ShareOptions(), AloneKey: at.Plan.Canonical.MemberKey(i)})
	}
	return out
}

// groupWarnings warns if the members of a group share no file.
func groupWarnings(models []*epmodel.Model) []string {
	if len(models) < 2 {
		return nil
	}
	users := make(map[string]int) // for each file, how many graphs refer to it
	for _, m := range models {
		seen := make(map[string]bool)
		for _, ref := range m.Sidecars() {
			if !seen[ref.Name] {
				seen[ref.Name] = true
				users[ref.Name]++
			}
		}
	}
	if slices.Contains(slices.Collect(maps.Values(users)), len(models)) {
		return nil
	}
	return []string{"no context binary is shared by all models of the group: the execution " +
		"provider compiled them separately"}
}

// NewBuild returns the build's record without the digests of its files. open has the free
// dimensions of the models' inputs.
func NewBuild(at *request.Attempt, scope string, models []*epmodel.Model, result compilers.Result,
	open []request.OpenDimension, created time.Time) *index.Build {
	r, p, m := at.Request, at.Plan, models[0]
	b := &index.Build{
		RequestKey: p.RequestKey, BuildKey: p.BuildKey, Scope: scope, UID: r.Peer.UID,
		ModelDigest: p.Canonical.Model, ModelName: r.Name, ModelPath: r.Path, Record: p.Record,
		RecordJSON: p.RecordJSON, EPs: p.StatedFacts(models), ORTVersion: result.ORTVersion,
		Route: p.Canonical.Route, Graph: result.Graph,
		ProviderOptions: make(map[string]map[string]string), SessionOptions: r.SessionOptions,
		CompileSeconds: result.Seconds, Created: created, IRVersion: m.IRVersion, Embed: r.Embed,
	}
	for _, name := range result.Files {
		b.Files = append(b.Files, index.File{Name: name})
	}
	for _, ep := range p.EPs {
		info, _ := compilers.EPByName(ep.Name)
		b.ProviderOptions[ep.Name] = identity.LibraryBaseNames(info, ep.Options)
	}
	b.Members = members(at, result)
	for i, m := range models {
		whose := ""
		if len(models) > 1 {
			whose = fmt.Sprintf("model %q: ", r.ModelFiles(i).Name)
		}
		b.IRVersion = max(b.IRVersion, m.IRVersion)
		for _, warning := range p.UncompiledWarnings(m, open) {
			b.Warnings = append(b.Warnings, whose+warning)
		}
	}
	b.Warnings = append(b.Warnings, groupWarnings(models)...)
	return b
}
