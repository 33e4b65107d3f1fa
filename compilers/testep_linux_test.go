package compilers_test

import (
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// testEPVersions are the ONNX Runtimes that the test EP is tested with: the oldest that is supported, one between, and the newest.
var testEPVersions = []string{"1.24.4", "1.28.0", "1.31.1"}

func TestTestEP(t *testing.T) {
	for _, version := range testEPVersions {
		t.Run(version, func(t *testing.T) {
			compilertest.Suite(t, compilertest.Subject{
				Compiler: newORT(t, compilers.ORTOptions{}), Runtime: compilertest.TestEPRuntime(t, version, compilertest.Release{}),
				EP: compilers.EP{Name: compilertest.TestEP}, NoNodesModel: negation(), Verdict: compilers.Optimal, Loads: true,
			})
		})
	}
}

// negation has an operator that the test EP does not know.
func negation() []byte {
	one := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{1}}
	}
	return tinymodel.Model{
		Nodes:  []tinymodel.Node{{Op: "Neg", Inputs: []string{"x"}, Outputs: []string{"y"}}},
		Inputs: []tinymodel.Value{one("x")}, Outputs: []tinymodel.Value{one("y")},
	}.Encode()
}
