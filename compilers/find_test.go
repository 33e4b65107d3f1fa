package compilers

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// tree makes empty files; a name with an arrow is a link.
func tree(t *testing.T, files ...string) string {
	dir := t.TempDir()
	for _, name := range files {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, nil, 0o600))
	}
	return dir
}

const (
	ovLibrary  = "libonnxruntime_providers_openvino_plugin.so"
	qnnLibrary = "libonnxruntime_providers_qnn.so"
)

func TestFind(t *testing.T) {
	for _, c := range []struct {
		name         string
		files        []string
		ort, version string
		eps          []string
	}{
		{"pip target",
			[]string{"onnxruntime/capi/libonnxruntime.so.1.31.1",
				"onnxruntime_ep_openvino/" + ovLibrary, "onnxruntime_qnn/" + qnnLibrary},
			"onnxruntime/capi/libonnxruntime.so.1.31.1", "1.31.1",
			[]string{"OpenVINOExecutionProvider", "QNNExecutionProvider"}},
		{"virtual environment",
			[]string{"lib/python3.11/site-packages/onnxruntime/capi/libonnxruntime.so.1.24.4",
				"lib/python3.11/site-packages/onnxruntime_qnn/" + qnnLibrary},
			"lib/python3.11/site-packages/onnxruntime/capi/libonnxruntime.so.1.24.4", "1.24.4",
			[]string{"QNNExecutionProvider"}},
		{"plain directory", []string{"libonnxruntime.so", ovLibrary}, "libonnxruntime.so", "",
			[]string{"OpenVINOExecutionProvider"}},
		{"release archive", []string{"lib/libonnxruntime.so.1.30.0", "lib/" + ovLibrary},
			"lib/libonnxruntime.so.1.30.0", "1.30.0", []string{"OpenVINOExecutionProvider"}},
		{"newest of several",
			[]string{"libonnxruntime.so.1.9.0", "libonnxruntime.so.1.31.1",
				"libonnxruntime.so.1.4.0", ovLibrary}, "libonnxruntime.so.1.31.1", "1.31.1",
			[]string{"OpenVINOExecutionProvider"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := tree(t, c.files...)
			r, err := Find(dir)
			require.NoError(t, err)
			require.Equal(t, filepath.Join(dir, c.ort), r.ORTLibrary)
			require.Equal(t, c.version, r.ORTVersion)
			var eps []string
			for _, ep := range r.EPs {
				eps = append(eps, ep.EP)
				require.Contains(t, ep.Files, ep.Path)
			}
			require.Equal(t, c.eps, eps)
		})
	}
}

func TestFindNamesTheSearchedPatterns(t *testing.T) {
	_, err := Find(tree(t, "onnxruntime/__init__.py"))
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorContains(t, err, "libonnxruntime.so")
	_, err = Find(tree(t, "libonnxruntime.so.1.31.1"))
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorContains(t, err, "QNNExecutionProvider")
	_, err = Find("/nowhere/at/all")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestVersionOfALink(t *testing.T) {
	dir := tree(t, "versions/libonnxruntime.so.1.28.0", ovLibrary)
	require.NoError(t,
		os.Symlink("versions/libonnxruntime.so.1.28.0", filepath.Join(dir, "libonnxruntime.so")))
	r, err := Find(dir)
	require.NoError(t, err)
	require.Equal(t, "1.28.0", r.ORTVersion)
}

func TestDirectoryWithPatternCharacters(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a[b]*")
	site := filepath.Join(dir, "lib/python3.12/site-packages")
	require.NoError(t, os.MkdirAll(filepath.Join(site, "onnxruntime/capi"), 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(site, "onnxruntime_qnn"), 0o700))
	for _, name := range []string{"onnxruntime/capi/libonnxruntime.so.1.31.1",
		"onnxruntime_qnn/" + qnnLibrary} {
		require.NoError(t, os.WriteFile(filepath.Join(site, name), nil, 0o600))
	}
	_, err := Find(dir)
	require.NoError(t, err)
}

func TestIdentityOfALibrary(t *testing.T) {
	dir := tree(t, "libonnxruntime.so.1.31.1", "libonnxruntime_providers_shared.so", ovLibrary,
		qnnLibrary, "libopenvino.so.2641", "libtbb.so", "cache.json", ".hidden.so")
	r, err := Find(dir)
	require.NoError(t, err)
	lib, err := r.Library("OpenVINOExecutionProvider")
	require.NoError(t, err)
	require.Equal(t,
		[]string{filepath.Join(dir, ovLibrary), filepath.Join(dir, "libopenvino.so.2641"),
			filepath.Join(dir, "libtbb.so")}, lib.Files)
	_, err = r.Library("NobodysExecutionProvider")
	require.ErrorIs(t, err, ErrNotFound)
}

// FindAll finds the runtimes of an environment that is not activated.
func TestFindAllLooksIntoEnvironmentsThatAreNotActive(t *testing.T) {
	files := []string{"lib/python3.11/site-packages/onnxruntime/capi/libonnxruntime.so.1.31.1",
		"lib/python3.11/site-packages/onnxruntime_qnn/" + qnnLibrary}
	t.Setenv("VIRTUAL_ENV", "")
	t.Setenv("HOME", t.TempDir())
	found := func() (dirs []string) {
		for _, r := range FindAll(t.Context()) {
			dirs = append(dirs, r.Directory)
		}
		return dirs
	}
	byPath := tree(t, append(files, "bin/python3")...)
	require.NoError(t, os.Chmod(filepath.Join(byPath, "bin", "python3"), 0o755))
	require.NotContains(t, found(), byPath)
	t.Setenv("PATH", filepath.Join(byPath, "bin"))
	require.Contains(t, found(), byPath)

	project := t.TempDir()
	require.NoError(t, os.Symlink(tree(t, files...), filepath.Join(project, ".venv")))
	t.Chdir(project)
	require.Contains(t, found(), filepath.Join(project, ".venv"))
}

func TestFindAllLooksIntoTheEnvironment(t *testing.T) {
	dir := tree(t, "lib/python3.11/site-packages/onnxruntime/capi/libonnxruntime.so.1.31.1",
		"lib/python3.11/site-packages/onnxruntime_qnn/"+qnnLibrary)
	t.Setenv("VIRTUAL_ENV", dir)
	t.Setenv("HOME", t.TempDir())
	require.NotEmpty(t, FindAll(t.Context()))
	require.Equal(t, dir, FindAll(t.Context())[0].Directory)
}
