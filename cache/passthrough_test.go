package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// own gives a compiled model that is whole by itself, as an application would bring it.
func (b *bench) own() *os.File {
	r := b.request(b.model(1))
	r.Embed = true
	a := b.acquire(r)
	return b.openFile(filepath.Join(a.Path, filepath.FromSlash(a.Graph)))
}

func TestCompiledModelOfTheApplicationsOwn(t *testing.T) {
	for load, verdict := range map[string]compilers.Verdict{
		compilers.Passed:       compilers.Optimal,
		compilers.Failed:       compilers.Unsupported,
		compilers.NotCheckable: compilers.Unknown,
		// its load check does not end: no reason to refuse the application its own file
		"none": compilers.Unknown,
	} {
		t.Run(load, func(t *testing.T) {
			b := newOpinion(t, &opinion{verdict: compilers.Optimal, load: load}, request.Policy{})
			a := b.acquire(b.request(b.own()))
			require.Equal(t, request.PassThrough, a.Outcome)
			require.Equal(t, verdict, a.Compatibility.Verdict, a.Compatibility.Reason)
			left, err := filepath.Glob(filepath.Join(b.state, "staging", "own-*"))
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// The reasons for a compiled model do not contradict each other.
func TestReasonsOfCompiledModels(t *testing.T) {
	b := newBench(t)
	own := b.own()
	b.acquire(b.request(own)) // which loads it
	e := b.explain(b.request(own))
	require.Equal(t, "it has one EPContext node, made by "+standin.EP+
		"; it loads, and its compatibility string is the execution provider's", e.Reason)
	foreign := tinymodel.Model{
		Nodes: []tinymodel.Node{{Op: "EPContext", Domain: "com.microsoft", Inputs: []string{"x"},
			Outputs: []string{"y"},
			Attributes: map[string]any{"embed_mode": int64(1), "main_context": int64(1),
				"ep_cache_context": []byte("context"), "source": "Another"}}},
		Inputs:  []tinymodel.Value{{Name: "x", Type: tinymodel.Float, Shape: []any{1}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: tinymodel.Float, Shape: []any{1}}},
	}
	a := b.acquire(b.request(b.writeModel("foreign.onnx", foreign.Encode())))
	require.Equal(t, request.PassThrough, a.Outcome)
	require.Equal(t, compilers.Unsupported, a.Compatibility.Verdict)
	require.Contains(t, a.Compatibility.Reason, "it does not load, because the request names no "+
		"execution provider that compiled it")

	aside := b.acquire(b.request(b.model(2)))
	r := b.request(b.openFile(filepath.Join(aside.Path, filepath.FromSlash(aside.Graph))))
	a = b.acquire(r)
	require.Equal(t, compilers.Unknown, a.Compatibility.Verdict)
	require.Equal(t, "its compatibility string is optimal for this runtime; whether it loads is "+
		"unknown, because only adopted models are loaded with their context files",
		a.Compatibility.Reason)
}
