package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/unixsock/wire"
)

// An EP that is in no table, and takes one Mul and nothing else as ONNX Runtime's example plugin EP
// does, needs nothing but its library in the configuration.
func TestExamplePluginEP(t *testing.T) {
	t.Parallel()
	const example = "ExampleExecutionProvider"
	r := compilertest.TestEPRuntime(t, "1.31.1", compilertest.Release{Name: example, Ops: "Mul",
		Single: true})
	s := newSite(t)
	s.config += fmt.Sprintf("[[runtime]]\nort_library = %q\nep_libraries = { %s = %q }\n",
		r.ORTLibrary, example, r.EPs[0].Path)
	d := s.start(t)
	c := d.dial()
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{3, 2}}
	}
	model := filepath.Join(t.TempDir(), "mul_1.onnx")
	require.NoError(t, os.WriteFile(model, tinymodel.Model{
		Nodes: []tinymodel.Node{{Op: "Mul", Inputs: []string{"X", "W"},
			Outputs: []string{"Y"}}},
		Inputs:  []tinymodel.Value{value("X")},
		Outputs: []tinymodel.Value{value("Y")},
		Initializers: []tinymodel.Tensor{{Name: "W", Type: tinymodel.Float, Shape: []int64{3, 2},
			Raw: tinymodel.Floats(1, 6)}},
	}.Encode(), 0o644))
	ask := withEPs(&wire.ExecutionProvider{Name: example})
	require.Equal(t, "compiled", get(t, c, model, ask).Outcome)
	require.Equal(t, "hit", get(t, c, model, ask).Outcome)
	require.Equal(t, "passed", d.list()[0].LoadCheck)
}
