package cache

import (
	"context"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
)

// readArtefact reads the compiled graph, and checks that every file which it, or one of its context binaries,
// refers to is among the result's. EPs check nothing of that when they load.
func readArtefact(ctx context.Context, out string, result compilers.Result) (*epmodel.Model, error) {
	sizes := make(map[string]int64, len(result.Files))
	for _, name := range result.Files {
		info, err := os.Stat(filepath.Join(out, filepath.FromSlash(name)))
		if err != nil {
			return nil, err
		}
		sizes[name] = info.Size()
	}
	f, err := os.Open(filepath.Join(out, result.Graph))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	graph, err := epmodel.FileSource(f)
	if err != nil {
		return nil, err
	}
	m, err := epmodel.Read(ctx, result.Graph, graph)
	if err != nil {
		return nil, err
	}
	if err := epmodel.Validate(m, sizes); err != nil {
		return nil, err
	}
	for _, node := range m.Contexts {
		if node.Inline.Length > 0 {
			if err := checkBinary(result.Graph, node.Open(graph), sizes); err != nil {
				return nil, err
			}
		}
	}
	for _, name := range result.Files[1:] {
		if err := checkSidecar(out, name, sizes); err != nil {
			return nil, err
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
