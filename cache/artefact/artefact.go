// Package artefact checks compiled models, whoever compiled them, and makes the records of builds.
package artefact

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
)

// Read reads the compiled graph, or those of a group in order, and checks that every file which the
// graphs, or one of their context binaries, refer to is among the result's, because EPs check nothing
// of that when they load. used are the files that are referred to.
func Read(ctx context.Context, out string, result compilers.Result) (models []*epmodel.Model, used map[string]bool, err error) {
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

// SuitsOutput compares the files of initializers that a graph refers to with those that were asked
// for. The error says what differs.
func SuitsOutput(o *identity.RecordOutput, m *epmodel.Model) error {
	for _, location := range m.Locations() {
		switch {
		case o == nil:
			return fmt.Errorf("initializers are in the file %q, and none was asked for", location)
		case !o.InitializersInSource && location != o.InitializersFile:
			return fmt.Errorf("initializers are in the file %q, and %q was asked for", location, o.InitializersFile)
		}
	}
	return nil
}

// Complete fails for a graph that leaves nodes to the CPU, where the request wants none left.
func Complete(c *identity.Record, m *epmodel.Model) error {
	if rest := m.Nodes - len(m.Contexts); rest > 0 && c.SessionOptions["session.disable_cpu_ep_fallback"] == "1" {
		return fmt.Errorf("%d nodes are left to other execution providers, and none was to be", rest)
	}
	return nil
}
