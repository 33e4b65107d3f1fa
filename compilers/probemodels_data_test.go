package compilers_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// The files in probes are what tinymodel writes. EPCACHED_WRITE_PROBES=1 writes them again.
func TestProbeModelsMatchTinymodel(t *testing.T) {
	var want [][]byte
	for i, m := range tinymodel.Probes() {
		want = append(want, m.Encode())
		if os.Getenv("EPCACHED_WRITE_PROBES") != "" {
			require.NoError(t, os.WriteFile(fmt.Sprintf("probes/%02d.onnx", i), want[i], 0o644))
		}
	}
	require.Equal(t, want, compilers.ProbeModels())
}
