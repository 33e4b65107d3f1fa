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
// their context binaries, refer to is among the result's. EPs check nothing of that when they load.
func readArtefacts(ctx context.Context, out string, result compilers.Result) ([]*epmodel.Model, error) {
	sizes := make(map[string]int64, len(result.Files))
	for _, name := range result.Files {
		info, err := os.Stat(filepath.Join(out, filepath.FromSlash(name)))
		if err != nil {
			return nil, err
		}
		sizes[name] = info.Size()
	}
	graphs := result.Graphs
	if len(graphs) == 0 {
		graphs = []string{result.Graph}
	}
	var models []*epmodel.Model
	for _, name := range graphs {
		m, err := readCompiled(ctx, out, name, sizes)
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	for _, name := range result.Files {
		if slices.Contains(graphs, name) {
			continue
		}
		if err := checkSidecar(out, name, sizes); err != nil {
			return nil, err
		}
	}
	return models, nil
}

// readCompiled is readArtefacts for one graph, but for what is beside it.
func readCompiled(ctx context.Context, out, name string, sizes map[string]int64) (*epmodel.Model, error) {
	f, err := os.Open(filepath.Join(out, name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	graph, err := epmodel.FileSource(f)
	if err != nil {
		return nil, err
	}
	m, err := epmodel.Read(ctx, name, graph)
	if err != nil {
		return nil, err
	}
	if err := epmodel.Validate(m, sizes); err != nil {
		return nil, err
	}
	compilers.NameSources(m)
	for _, node := range m.Contexts {
		if node.Inline.Length > 0 {
			if err := checkBinary(name, node.Open(graph), sizes); err != nil {
				return nil, err
			}
		}
	}
	return m, nil
}

func checkSidecar(out, name string, sizes map[string]int64) error {
	f, err := os.Open(filepath.Join(out, filepath.FromSlash(name)))
	if err != nil {
		return err
	}
	defer f.Close()
	src, err := epmodel.FileSource(f)
	if err != nil {
		return err
	}
	return checkBinary(name, src, sizes)
}

func checkBinary(name string, bin epmodel.Source, sizes map[string]int64) error {
	refs, err := epmodel.BinaryReferences(name, bin)
	if err != nil {
		return err
	}
	return epmodel.ValidateReferences(name, refs, sizes)
}
