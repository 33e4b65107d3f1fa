//go:build linux && (amd64 || arm64)

package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// both asks for one form after the other, and gives both answers.
func (b *bench) both(ask func() *request.Request, embedFirst bool) (made,
	converted *request.Answer) {
	form := func(embed bool) *request.Answer {
		r := ask()
		r.Embed, r.VerifyOutput = embed, 0.05
		return b.acquire(r)
	}
	made = form(embedFirst)
	require.Equal(b, request.Compiled, made.Outcome)
	require.Equal(b, 0.05, made.Build.VerifiedOutput)
	converted = form(!embedFirst)
	require.Equal(b, request.Hit, converted.Outcome, converted.Why)
	require.Contains(b, converted.Why, "converted from")
	require.Equal(b, compilers.Passed, converted.Build.LoadCheck)
	for _, w := range append(made.Warnings, converted.Warnings...) {
		require.NotContains(b, w, "not verified", "what is converted computes right, too")
	}
	require.ElementsMatch(b, b.contexts(made), b.contexts(converted))
	return made, converted
}

// One main context for many parts: the others' nodes stay as they are, in both directions, and QNN
// loads and runs both.
func TestQNNInManyPartsIsConverted(t *testing.T) {
	for name, embedFirst := range map[string]bool{"into the graph": false,
		"out of the graph": true} {
		t.Run(name, func(t *testing.T) {
			b, _, _ := newQNNBench(t)
			made, converted := b.both(func() *request.Request {
				return b.forQNN(islands(4), "60",
					map[string]string{"enable_htp_fp16_precision": "1"})
			}, embedFirst)
			before, after := b.graphOf(made).Contexts, b.graphOf(converted).Contexts
			require.Len(t, after, 4)
			for i := range before {
				require.Equal(t, before[i].MainContext, after[i].MainContext)
				if before[i].MainContext == 0 {
					require.Equal(t, before[i].EmbedMode, after[i].EmbedMode,
						"a secondary node was touched")
				}
			}
			require.Equal(t, made.GraphOptimizationLevel, converted.GraphOptimizationLevel)
		})
	}
}

// Several contexts are several files, or all in the graph.
func TestSeveralContextsAreConverted(t *testing.T) {
	for name, embedFirst := range map[string]bool{"into the graph": false,
		"out of the graph": true} {
		t.Run(name, func(t *testing.T) {
			b, _, _ := newTestEPBench(t)
			path := filepath.Join(t.TempDir(), "m.onnx")
			require.NoError(t, os.WriteFile(path, threeParts().Encode(), 0o644))
			made, converted := b.both(func() *request.Request {
				r := b.request(b.openFile(path))
				r.EPs = []identity.EP{{Name: compilertest.TestEP,
					Options: map[string]string{"primaries": "each"}}}
				return r
			}, embedFirst)
			require.Len(t, b.contexts(made), 3)
			require.Len(t, converted.Build.Files, map[bool]int{false: 1, true: 4}[embedFirst])
		})
	}
}
