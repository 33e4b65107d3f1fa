package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// qnnCompile configures testdata/tools/qnn-compile, or a copy of it, with the libraries in a
// directory.
func qnnCompile(t *testing.T, tool, sdk string) string {
	python := os.Getenv("EPCACHED_PYTHON")
	if python == "" {
		t.Skip("NOT TESTED WITH A REAL TOOL: EPCACHED_PYTHON is not set; testdata/fetch-python " +
			"makes an environment")
	}
	interpreter, err := filepath.EvalSymlinks(python)
	require.NoError(t, err)
	return fmt.Sprintf(`
[[compiler]]
ep = "QNNExecutionProvider"
command = [%q, %q, "--runtime", %q, "--embed={embed}", "{model}", "{output}", "--options", `+
		`"{options}"]
version = [%[2]q, "--runtime", %[3]q, "--version"]
files = [%[2]q]
read = [%[4]q, %[5]q, %[3]q]
`, python, tool, sdk, filepath.Dir(filepath.Dir(python)), filepath.Dir(filepath.Dir(interpreter)))
}

// A vendor's own compiler makes real artefacts for the daemon, and is a part of what they are.
func TestVendorsOwnCompiler(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, qnn)
	script, err := os.ReadFile("../../testdata/tools/qnn-compile")
	require.NoError(t, err)
	tool := filepath.Join(t.TempDir(), "qnn-compile")
	require.NoError(t, os.WriteFile(tool, script, 0o755))
	s := newSite(t, runtime)
	s.config += qnnCompile(t, tool, runtime)
	d := s.start(t)
	c := d.dial()
	model := writeModel(t, t.TempDir(), 1)
	made := get(t, c, model, withEPs(qnnProvider()))
	require.Equal(t, "compiled", made.Outcome)
	made.requireRight(t)
	builds := d.list()
	require.Len(t, builds, 1)
	require.Equal(t, "passed", builds[0].LoadCheck)
	require.Contains(t, builds[0].EpVersion, "qnn-compile 1.0")
	require.Equal(t, "hit", get(t, c, model, withEPs(qnnProvider())).Outcome)

	_, err = tryGet(t, c, writeModel(t, t.TempDir(), 2), withEPs(qnnProvider()),
		func(
			r *wire.Acquire) {
			r.SessionOptions = map[string]string{"session.disable_quant_qdq": "1"}
		})
	require.ErrorIs(t, err, unixsock.ErrBadRequest, "what cannot be passed to the tool")
	require.ErrorContains(t, err, "disable_quant_qdq")

	require.NoError(t, os.WriteFile(tool, append(script, "# another version\n"...), 0o755))
	judged := get(t, c, model, withEPs(qnnProvider()))
	require.Equal(t, made.Build, judged.Build)
	require.Equal(t, "fingerprint", judged.CompatibilitySource,
		"judged, as what another library made")
	require.NotEqual(t, made.Build, get(t, c, model, withEPs(qnnProvider()), refresh).Build,
		"another tool makes other builds")
}

// The same for a runtime without the EP's library: applications bring it, and nothing of it is
// asked for here.
func TestVendorsOwnCompilerWithoutTheLibrary(t *testing.T) {
	t.Parallel()
	sdk := runtimeDir(t, qnn)
	tool, err := filepath.Abs("../../testdata/tools/qnn-compile")
	require.NoError(t, err)
	s := newSite(t, runtimeDir(t, openVINO))
	s.config += qnnCompile(t, tool, sdk) + "without_library = true\n"
	d := s.start(t)
	c := d.dial()
	model := writeModel(t, t.TempDir(), 1)
	withOptions := func(options map[string]string) func(*wire.Acquire) {
		return withEPs(&wire.ExecutionProvider{Name: "QNNExecutionProvider", Options: options})
	}
	made := get(t, c, model, withOptions(map[string]string{"soc_model": "60"}))
	require.Equal(t, "compiled", made.Outcome)
	builds := d.list()
	require.Len(t, builds, 1)
	require.Equal(t, "cannot be tested here", builds[0].LoadCheck)
	_, err = tryGet(t, c, model, withOptions(map[string]string{"backend_path": "libQnnCpu.so"}))
	require.ErrorIs(t, err, unixsock.ErrBadRequest)
	require.ErrorContains(t, err,
		`option "backend_path" of QNNExecutionProvider: there is no library "libQnnCpu.so"`)
}
