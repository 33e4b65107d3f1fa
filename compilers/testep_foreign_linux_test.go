//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A binary of arbitrary bytes is refused by the EP, or loads and computes something; this process
// goes on. Its checksum does not help it here.
func TestTestEPReadsForeignBinaries(t *testing.T) {
	h := hostOf(t, newestORT)
	dir, c := compiledAlone(t, h, nil)
	path := filepath.Join(dir, c.CacheContext)
	sound, err := os.ReadFile(path)
	require.NoError(t, err)
	random := rand.New(rand.NewPCG(1, 1))
	loaded, refused := 0, 0
	for range 400 {
		b := append([]byte(nil), sound...)
		for range 1 + random.IntN(3) {
			// Weights may hold anything; what describes the graphs stands behind them.
			b[len(b)-1-random.IntN(700)] = byte(random.IntN(256) >> random.IntN(8))
		}
		require.NoError(t, os.WriteFile(path, b, 0o600))
		s, err := h.options(t, nil, set{"check": "0"}).Open(filepath.Join(dir, "m_ctx.onnx"))
		if err != nil {
			refused++
			continue
		}
		loaded++
		_, _ = s.Run(someInputs(t, s)) // it may refuse: the graph may be for other inputs
		s.Release()
	}
	require.NotZero(t, loaded)
	require.NotZero(t, refused)
	t.Logf("%d loaded, %d refused", loaded, refused)
}
