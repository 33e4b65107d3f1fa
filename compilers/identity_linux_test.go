package compilers_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// The libraries that an application has loaded identify a runtime only if no run path leads
// elsewhere.
func TestRunPathsThatLeadElsewhere(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("NOT TESTED: no C compiler to build libraries with")
	}
	for path, elsewhere := range map[string]bool{
		"$ORIGIN": false, "$ORIGIN:$ORIGIN/../ep.libs": false, "/usr/lib": false,
		"$ORIGIN/../..": true, "$ORIGIN/../other.libs": true,
	} {
		t.Run(path, func(t *testing.T) {
			dir := t.TempDir()
			directory := filepath.Join(dir, "ep")
			require.NoError(t, os.MkdirAll(directory+".libs", 0o700))
			require.NoError(t, os.Mkdir(directory, 0o700))
			source, library := filepath.Join(dir, "ep.c"), filepath.Join(directory,
				"libonnxruntime_providers_qnn.so")
			require.NoError(t, os.WriteFile(source, []byte("int x;\n"), 0o600))
			out, err := exec.Command(cc, "-shared", "-Wl,-rpath,"+path, "-o", library,
				source).CombinedOutput()
			require.NoError(t, err, "%s", out)
			for _, name := range []string{"libonnxruntime.so.1.31.1", "libsdk.so.2", ".hidden.so",
				"notes.txt"} {
				require.NoError(t, os.WriteFile(filepath.Join(directory, name), nil, 0o600))
			}
			require.NoError(t, os.WriteFile(filepath.Join(directory+".libs", "libc++-71bc.so.1"),
				nil, 0o600))
			r, err := compilers.Find(directory)
			require.NoError(t, err)
			require.Equal(t, elsewhere, r.EPs[0].Elsewhere)
			require.Equal(t, []string{"../ep.libs/libc++-71bc.so.1", "libonnxruntime.so.1.31.1",
				"libsdk.so.2"}, slices.Sorted(slices.Values(compilers.LibrariesBeside(library))))
		})
	}
}

// The Python client shows what this one does, so that both are served the same builds; and that is
// all of a real library.
func TestClientsShowTheSameLibraries(t *testing.T) {
	python := os.Getenv("EPCACHED_PYTHON")
	if python == "" {
		t.Skip("SKIPPED: EPCACHED_PYTHON is not set; make test sets it")
	}
	for _, name := range []string{"openvino-1.8.1", "qnn-2.7.0"} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.Runtime(t, name)
			lib := r.EPs[0]
			require.False(t, lib.Elsewhere)
			beside := compilers.LibrariesBeside(lib.Path)
			for _, path := range lib.Files {
				relative, err := filepath.Rel(filepath.Dir(lib.Path), path)
				require.NoError(t, err)
				require.True(t, path == lib.Path || slices.Contains(beside, relative), relative)
			}
			clients, err := filepath.Abs(filepath.Join("..", "clients", "python"))
			require.NoError(t, err)
			cmd := exec.Command(python, "-c",
				"import json, sys; from epcache._request import Library\n"+
					"print(json.dumps(sorted(Library('E', sys.argv[1]).neighbours())))", lib.Path)
			cmd.Env = append(os.Environ(),
				"PYTHONPATH="+clients+":"+filepath.Dir(filepath.Dir(lib.Path)),
				"PYTHONDONTWRITEBYTECODE=1")
			out, err := cmd.Output()
			require.NoError(t, err)
			var shown []string
			require.NoError(t, json.Unmarshal(out, &shown))
			require.Equal(t, slices.Sorted(slices.Values(beside)), shown)
		})
	}
}
