package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// loaded is what ONNX Runtime made of a model package.
type loaded struct {
	Variants        []string
	Selected, Error string
}

// loadPackage opens a model package with the libraries of a runtime, and no epcached.
func loadPackage(t *testing.T, dir, runtime, ep, library string) (out loaded) {
	t.Helper()
	python := os.Getenv("EPCACHED_PYTHON")
	if python == "" {
		t.Skip("SKIPPED: no EPCACHED_PYTHON; testdata/fetch-python makes it")
	}
	ort, err := filepath.Glob(filepath.Join(runtime, "onnxruntime/capi/libonnxruntime.so.*"))
	require.NoError(t, err)
	require.Len(t, ort, 1)
	cmd := exec.CommandContext(limited(t), python, "../../testdata/tools/load_package.py", ort[0],
		dir, ep, filepath.Join(runtime, library))
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, string(text))
	require.NoError(t, json.Unmarshal(text, &out), string(text))
	return out
}

// ONNX Runtime opens a model package of ours, selects for each execution provider the build that
// this one made, and creates a session of it.
func TestONNXRuntimeOpensAModelPackage(t *testing.T) {
	const ep = "OpenVINOExecutionProvider"
	runtimes := []string{runtimeDir(t, openVINO), runtimeDir(t, silentOpenVINO),
		runtimeDir(t, "openvino-1.4.0")}
	a := newSite(t, runtimes...)
	a.start(t)
	model := modelOf(t, "tiny-convolution")
	variantOf := make(map[string]string)
	for _, r := range runtimes {
		made := a.get(t, []string{model, "--ep", ep + ":CPU", "--runtime", r})
		variantOf[r] = made["build"].(string)[:12]
	}
	dir := filepath.Join(t.TempDir(), "package")
	out, status := a.ctl(t, "export", model, "--model-package", dir)
	require.Zero(t, status, out)
	require.Contains(t, out, "OpenVINOExecutionProvider 1.4.0")
	require.Contains(t, out, "states no compatibility")
	const library = "onnxruntime_ep_openvino/libonnxruntime_providers_openvino_plugin.so"
	for _, r := range runtimes[:2] {
		got := loadPackage(t, dir, r, ep, library)
		require.Equal(t, variantOf[r], got.Selected, "%+v", got)
		require.Empty(t, got.Error)
		require.Equal(t, variantOf[runtimes[2]], got.Variants[len(got.Variants)-1])
	}
	out, status = a.ctl(t, "export", model, "--model-package", dir)
	require.Equal(t, 1, status, out)
	require.Contains(t, out, "not empty")

	// ONNX Runtime would take the first one of two that the execution provider rates alike.
	next := a.get(t, []string{model, "--ep", ep + ":CPU", "--embed"})["build"].(string)[:12]
	out, status = a.ctl(t, "export", model, "--model-package", dir+"1")
	require.Zero(t, status, out)
	got := loadPackage(t, dir+"1", runtimes[0], ep, library)
	require.Empty(t, got.Error)
	require.Len(t, got.Variants, 3)
	alike := map[string]string{next: variantOf[runtimes[0]], variantOf[runtimes[0]]: next}
	require.Contains(t, out, alike[got.Selected]+" is left out")

	a.get(t, []string{modelOf(t, "tiny-mlp"), "--ep", ep + ":CPU"})
	out, status = a.ctl(t, "export", "--all", "--model-package", dir+"2")
	require.Equal(t, 2, status, out)
	require.Contains(t, out, "of one model")
}
