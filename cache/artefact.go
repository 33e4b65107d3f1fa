package cache

import (
	"context"
	"os"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
)

// readArtefacts reads the compiled graph, or those of a group in order, and checks that every file which they, or one of
// their context binaries, refer to is among the result's. EPs check nothing of that when they load. used are these files.
func readArtefacts(ctx context.Context, out string, result compilers.Result) (models []*epmodel.Model, used map[string]bool, err error) {
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
	opened := openFiles{}
	defer opened.close()
	for _, name := range graphs {
		graph, err := opened.source(filepath.Join(out, name))
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
		bin, err := opened.source(filepath.Join(out, filepath.FromSlash(name)))
		if err == nil {
			err = binary(name, bin)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	return models, used, nil
}
