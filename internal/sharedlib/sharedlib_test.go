package sharedlib

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A plugin whose run path leads to its libraries needs no help.
func TestPluginsWithRunPathsPreloadNothing(t *testing.T) {
	dir := os.Getenv("EPCACHED_RUNTIMES")
	if dir == "" {
		t.Skip("NOT TESTED: EPCACHED_RUNTIMES is not set; `make test` sets it")
	}
	plugins, err := filepath.Glob(filepath.Join(dir, "*", "onnxruntime_*",
		"libonnxruntime_prov*.so"))
	require.NoError(t, err)
	require.NotEmpty(t, plugins)
	for _, plugin := range plugins {
		require.Empty(t, Preloads(plugin), plugin)
		require.Empty(t, Links(plugin), plugin)
		require.False(t, Exports(plugin, "NoSuchFunction"))
	}
}

func TestFilesThatAreNoLibrariesNeedNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "libnone.so")
	require.NoError(t, os.WriteFile(path, []byte("\x7fELF\x02\x01\x01 cut"), 0o644))
	_, err := Read(path)
	require.Error(t, err)
	require.Empty(t, Preloads(path))
	require.False(t, Exports(path, "CreateEpFactories"))
	require.Empty(t, Preloads(filepath.Join(t.TempDir(), "missing.so")))
}

func BenchmarkPreloads(b *testing.B) {
	plugins, err := filepath.Glob(filepath.Join(os.Getenv("EPCACHED_RUNTIMES"), "openvino-1.8.1",
		"onnxruntime_*", "libonnxruntime_prov*.so"))
	require.NoError(b, err)
	for b.Loop() {
		for _, plugin := range plugins {
			Preloads(plugin)
		}
	}
}
