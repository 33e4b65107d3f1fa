//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// Two shapes of a model, compiled by real execution providers, share their weights. The one that is
// packed comes back byte for byte, loads, and computes what it did before.
func TestRealVariantsArePackedAndCompute(t *testing.T) {
	cases := map[string]struct {
		runtime string
		ep      identity.EP
		least   float64 // part of the binary that packing has to save
	}{
		"OpenVINO": {"openvino-1.8.1",
			identity.EP{Name: "OpenVINOExecutionProvider",
				Options: map[string]string{
					"load_config": `{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}`}}, 0.9},
		"QNN": {"qnn-2.7.0",
			identity.EP{Name: qnn,
				Options: map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}},
			0.9},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := compilertest.Runtime(t, c.runtime)
			b, ort := newRealBench(t, r)
			ask := func(rows int) *request.Request {
				path := filepath.Join(b.TempDir(), "m.onnx")
				require.NoError(b, os.WriteFile(path, compilertest.Dense(1, 512, rows), 0o644))
				request := b.request(b.openFile(path))
				request.EPs = []identity.EP{c.ep}
				return request
			}
			run := func(a *request.Answer) []byte {
				eps := []compilers.EP{{Name: c.ep.Name, Options: a.ProviderOptions[c.ep.Name]}}
				return b.outputs(ort,
					compilers.CheckJob{Runtime: r, EPs: eps,
						Graph: filepath.Join(a.Path, filepath.FromSlash(a.Graph))})
			}
			var packed *request.Answer
			for _, rows := range []int{1, 4} {
				packed = b.acquire(ask(rows))
				require.Equal(t, request.Compiled, packed.Outcome)
				require.Equal(t, compilers.Passed, packed.Build.LoadCheck)
			}
			files, outputs := b.read(packed), run(packed)
			require.NoError(t, packed.View.Close())
			b.later.Add(int64(time.Hour))
			results, err := b.cache.Pack(context.Background(), b.self(), nil, true, false, nil)
			require.NoError(t, err)
			require.Len(t, results.Builds, 2)
			require.True(t, b.cache.packing.OnlyPacked(large(packed.Build)), "%v", results)
			size := int64(0)
			for _, f := range packed.Build.Files {
				size = max(size, f.Size)
			}
			freed := results.FreedBytes
			t.Logf("%d of %d bytes are shared", freed, size)
			require.Greater(t, float64(freed), c.least*float64(size))

			again := b.acquire(ask(4))
			require.Equal(t, request.Hit, again.Outcome)
			require.Equal(t, files, b.read(again))
			require.Equal(t, outputs, run(again))
		})
	}
}
