//go:build linux && (amd64 || arm64)

package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/internal/apierr"
)

// dynamic is a request for a model of one input with the first dimension batch.
func (b *bench) dynamic(ep string, batch any) *request.Request {
	path := filepath.Join(b.TempDir(), "dynamic.onnx")
	require.NoError(b, os.WriteFile(path, compilertest.Dense(1, 16, batch), 0o644))
	r := b.request(b.openFile(path))
	r.EPs = []identity.EP{{Name: ep}}
	return r
}

// An execution provider that needs to know every shape takes nothing of such a model: then the
// answer says which dimensions to fix.
func TestOpenDimensionsAreNamed(t *testing.T) {
	b, _, _ := newTestEPBench(t)
	for name, row := range map[string]struct {
		batch any
		fix   func(*request.Request)
		says  []string
	}{
		"by name": {"batch",
			func(r *request.Request) { r.FreeDimensions = map[string]int64{"batch": 4} },
			[]string{`batch of "x"`, "--dim batch=N"}},
		"by denotation": {tinymodel.Meaning("DATA_BATCH"),
			func(
				r *request.Request) {
				r.FreeDimensionsByDenotation = map[string]int64{"DATA_BATCH": 4}
			}, []string{`DATA_BATCH of "x"`, "dims_by_denotation DATA_BATCH"}},
		"by denotation, in other letters": {tinymodel.Meaning("DATA_BATCH"),
			func(
				r *request.Request) {
				r.FreeDimensionsByDenotation = map[string]int64{"data_batch": 4}
			}, []string{"DATA_BATCH"}},
		"by a name that is no word": {"a \x1b[2J\"b",
			func(r *request.Request) { r.FreeDimensions = map[string]int64{"a \x1b[2J\"b": 4} },
			[]string{`--dim "a \x1b[2J\"b"=N`}},
		"not at all": {"", nil, []string{"without a name"}},
	} {
		t.Run(name, func(t *testing.T) {
			b.refused(b.dynamic(compilertest.TestEP, row.batch))
			// from memory, which knows as much
			e := b.refused(b.dynamic(compilertest.TestEP, row.batch))
			require.Equal(t, apierr.CompileFailed, e.Class)
			require.Equal(t, "no node taken", e.Facts["reason"])
			for _, text := range row.says {
				require.Contains(t, e.Hint, text)
			}
			if row.fix == nil {
				require.NotContains(t, e.Hint, "--dim")
				return
			}
			r := b.dynamic(compilertest.TestEP, row.batch)
			row.fix(r)
			a := b.acquire(r)
			require.NotEmpty(t, a.Build)
			require.Empty(t, a.Warnings)
		})
	}
	other := b.dynamic(compilertest.TestEP, "batch")
	other.FreeDimensions = map[string]int64{"length": 4}
	hint := b.refused(other).Hint
	require.Contains(t, hint, "--dim batch=N")
	require.Contains(t, hint, `no input of the model has a free dimension "length"; `)
	require.NotContains(t, hint, `"length"; or`)
}

// A build of a model that the EP takes only in part says so, with the dimensions that may be the
// reason.
func TestOpenDimensionsOfABuild(t *testing.T) {
	b, _, _ := newTestEPBench(t)
	fixed := compilertest.DenseModel(1, 16, 2)
	fixed.Inputs = append(fixed.Inputs,
		tinymodel.Value{Name: "ids", Type: tinymodel.Float, Shape: []any{"length"}})
	fixed.Outputs = append(fixed.Outputs,
		tinymodel.Value{Name: "ids2", Type: tinymodel.Float, Shape: []any{"length"}})
	fixed.Nodes = append(fixed.Nodes,
		tinymodel.Node{Name: "free", Op: "Relu", Inputs: []string{"ids"},
			Outputs: []string{"ids2"}})
	path := filepath.Join(t.TempDir(), "partly.onnx")
	require.NoError(t, os.WriteFile(path, fixed.Encode(), 0o644))
	r := b.request(b.openFile(path))
	r.EPs = []identity.EP{{Name: compilertest.TestEP}}
	a := b.acquire(r)
	require.Len(t, a.Warnings, 2)
	require.Contains(t, a.Warnings[1], `length of "ids"`)
}

// QNN ahead of time needs fixed shapes, and is a real case.
func TestOpenDimensionsWithQNN(t *testing.T) {

	b, _, _ := newQNNBench(t)
	ask := func() *request.Request {
		r := b.dynamic(qnn, "batch")
		r.EPs[0].Options = map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}
		return r
	}
	e := b.refused(ask())
	require.Equal(t, apierr.CompileFailed, e.Class)
	require.Contains(t, e.Hint, "--dim batch=N")
	require.Equal(t, "batch", e.Facts["free_dimensions"])
	r := ask()
	r.FreeDimensions = map[string]int64{"batch": 4}
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
	two := ask()
	two.FreeDimensions = map[string]int64{"batch": 2}
	require.Equal(t, request.Compiled, b.acquire(two).Outcome, "another size is another build")
	require.Equal(t, request.Hit, b.acquire(r).Outcome)
}
