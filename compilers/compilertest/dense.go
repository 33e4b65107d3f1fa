package compilertest

import "github.com/epcached/epcached/compilers/tinymodel"

// Dense is y[batch,n] = Relu(x[batch,n] W[n,n]), with weights from a seed: about 4 n² bytes. batch
// is an int or the name of a free dimension.
func Dense(seed uint64, n int, batch any) []byte { return DenseModel(seed, n, batch).Encode() }

// DenseModel is Dense before it is encoded.
func DenseModel(seed uint64, n int, batch any) tinymodel.Model {
	return tinymodel.Model{
		Nodes: []tinymodel.Node{
			{Name: "mul", Op: "MatMul", Inputs: []string{"x", "w"}, Outputs: []string{"h"}},
			{Name: "act", Op: "Relu", Inputs: []string{"h"}, Outputs: []string{"y"}},
		},
		Inputs:  []tinymodel.Value{{Name: "x", Type: tinymodel.Float, Shape: []any{batch, n}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: tinymodel.Float, Shape: []any{batch, n}}},
		Initializers: []tinymodel.Tensor{{Name: "w", Type: tinymodel.Float,
			Shape: []int64{int64(n), int64(n)}, Raw: tinymodel.Floats(seed, n*n)}},
	}
}
