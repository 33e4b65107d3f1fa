package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/runtimes"
)

// A package that is installed into a runtime's directory is seen by the next request for it, and by
// the next examination, without a restart.
func TestPackagesInstalledLaterAreSeen(t *testing.T) {
	b := newBench(t)
	install := func(dir, file string) {
		dir = filepath.Join(b.runtime, dir)
		require.NoError(t, os.MkdirAll(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte("library"), 0o644))
	}
	find := func(ep string, in runtimes.Ref) error {
		_, _, err := b.cache.runtimes.Resolve(context.Background(), &runtimes.Wanted{Ref: in,
			EPs: []identity.EP{{Name: ep}}, UID: b.cache.uid}, func(string) {})
		return err
	}
	const qnn, trt = "QNNExecutionProvider", "TensorrtExecutionProvider"
	require.ErrorContains(t, find(qnn, runtimes.Ref{}), qnn)
	install("onnxruntime_qnn", "libonnxruntime_providers_qnn.so")
	require.NoError(t, find(qnn, runtimes.Ref{}))
	named := runtimes.Ref{Directory: b.runtime}
	require.ErrorContains(t, find(trt, named), trt)
	install("onnxruntime_ep_tensorrt", "libonnxruntime_ep_tensorrt.so")
	require.NoError(t, find(trt, named))

	install("onnxruntime_ep_openvino", "libonnxruntime_providers_openvino_plugin.so")
	adviceOn(t, b.doctor(b.self()), "runtime "+b.runtime+" OpenVINOExecutionProvider")
}
