//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/stretchr/testify/require"
)

// A plugin that no table names is found by the function that it exports, and its EP has the name
// that its Python package states.
func TestPluginsAreFoundByWhatTheyExport(t *testing.T) {
	library, err := os.ReadFile(compilertest.TestEPLibrary(t))
	require.NoError(t, err)
	for name, c := range map[string]struct{ file, text, ep string }{
		"stated by a function": {"new_ep/libsome.so",
			"def get_ep_name():\n    return \"NewExecutionProvider\"\n", "NewExecutionProvider"},
		"stated by a constant": {"onnxruntime_new/lib/libonnxruntime_new.so",
			"import os\nEP_NAME = \"new\"\n", "new"},
		"not stated": {"new/libonnxruntime_providers_shiny_plugin.so", "", "shiny"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(path string, data []byte) {
				path = filepath.Join(dir, path)
				require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
				require.NoError(t, os.WriteFile(path, data, 0o600))
			}
			write("onnxruntime/capi/libonnxruntime.so.1.31.1", nil)
			// a part of ONNX Runtime, a library of another kind, and no library
			write("onnxruntime/capi/libonnxruntime_providers_cuda.so", library)
			write("other/libother.so", []byte("\x7fELF\x02\x01\x01"))
			_, err := compilers.Find(dir)
			require.ErrorIs(t, err, compilers.ErrNotFound)
			require.ErrorContains(t, err, "cuda: built into this ONNX Runtime")
			require.ErrorContains(t, err, "ep_libraries")
			write(c.file, library)
			if c.text != "" {
				write(filepath.Join(filepath.Dir(c.file), "..", "__init__.py"), []byte(c.text))
				write(filepath.Join(filepath.Dir(c.file), "__init__.py"), []byte(c.text))
			}
			r, err := compilers.Find(dir)
			require.NoError(t, err)
			require.Len(t, r.EPs, 1)
			require.Equal(t, c.ep, r.EPs[0].EP)
			require.Equal(t, filepath.Join(dir, c.file), r.EPs[0].Path)
		})
	}
}
