//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/conformance/certificate"
	"github.com/epcached/epcached/compilers/workerproto"
)

func TestMain(m *testing.M) {
	status := m.Run()
	compilertest.RemoveTestEP()
	compilertest.RemoveWorker()
	os.Exit(status)
}

const newestORT = "1.31.1" // that tests with the test EP use

// aLibrary is a file beside what is called an ONNX Runtime.
func aLibrary(t *testing.T) string {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "libonnxruntime.so.1.31.1"), nil, 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "ep"), 0o700))
	library := filepath.Join(dir, "ep", "libe.so")
	require.NoError(t, os.WriteFile(library, nil, 0o600))
	return library
}

func TestCertificateNamesTheCause(t *testing.T) {
	finding := func(name, level string, calls ...workerproto.Call) certificate.Finding {
		return certificate.Finding{Guideline: certificate.Guideline{Name: name, Level: level,
			Page: "https://page", Says: "a sentence"},
			Finding: workerproto.Finding{Outcome: workerproto.Broken, Calls: calls}}
	}
	holds := finding("one", certificate.Required)
	holds.Outcome = workerproto.Holds
	c := certificate.Certificate{EP: "E", Options: map[string]string{"a": "b"}, Model: "Mul float",
		Library:    certificate.Library{Path: "/libe.so", Version: "2.0.0"},
		ORTVersion: "1.31.1", Summary: map[string]map[string]int{
			certificate.Required:    {workerproto.Holds: 1},
			certificate.Recommended: {workerproto.Broken: 1}}}
	var out bytes.Buffer
	printFinding(&out, holds)
	printFinding(&out, finding("two", certificate.Recommended,
		workerproto.Call{Call: "CreateSession(m.onnx)", Happened: "a session", OK: true},
		workerproto.Call{Call: "Run", Expected: "numbers", Happened: "NaN\x1b"}))
	printSummary(&out, c)
	require.NotContains(t, out.String(), "\x1b")
	require.Contains(t, out.String(), `  holds           one
  broken          two (recommended)
      CreateSession(m.onnx): a session
      Run
        expected: numbers
        happened: "NaN\x1b"
      says: a sentence
      see https://page
`)
	require.Contains(t, out.String(), "execution provider   E 2.0.0\n")
	require.Contains(t, out.String(), "options              [a:b]\n")
	require.Contains(t, out.String(), "driver               -\n")
	require.Contains(t, out.String(), "recommended          0 hold, 1 broken, 0 not applicable\n")
	require.Equal(t, certificate.Recommended, c.BrokenLevel())
}

// Each level has an exit status, and --json prints the whole certificate whatever it is.
func TestExitStatusAndJSON(t *testing.T) {
	require.Equal(t, map[string]int{certificate.Required: 9, certificate.Recommended: 10,
		certificate.Optional: 11}, statuses)
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	tool := exec.Command(compilertest.Conformance(t), "--json", "--option", "fault=fail@run",
		r.EPs[0].Path)
	out, err := tool.Output()
	require.Error(t, err)
	require.Equal(t, statuses[certificate.Required], tool.ProcessState.ExitCode())
	var all map[string]any
	require.NoError(t, json.Unmarshal(out, &all))
	for _, key := range []string{"suite_version", "date", "ep", "library", "options",
		"ort_version", "device", "driver_version", "hardware_architecture",
		"compatibility_string", "host", "model", "summary", "guidelines"} {
		require.NotEmpty(t, all[key], key)
	}
	for _, key := range []string{"section", "id", "name", "level", "page", "says", "outcome",
		"calls"} {
		require.Contains(t, all["guidelines"].([]any)[0], key)
	}
}

func TestMistakes(t *testing.T) {
	library := aLibrary(t)
	for name, row := range map[string]struct {
		args []string
		says string
	}{
		"no library":       {[]string{library + "x"}, "libe.sox"},
		"no older library": {[]string{"--older", library + "x", library}, "libe.sox"},
		"two libraries":    {[]string{library, library}, "accepts 1 library"},
		"no ONNX Runtime": {[]string{"--runtime", filepath.Dir(library), library},
			"--runtime DIR"},
		"no ONNX Runtime above": {[]string{"/proc/self/exe"},
			`exe": libonnxruntime.so*: not found in any directory above it`},
		"no option": {[]string{"--option", "k", library}, `"k" is not K=V`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := run(t.Context(), &bytes.Buffer{}, row.args)
			require.ErrorContains(t, err, row.says)
		})
	}
	out, err := exec.Command(compilertest.Conformance(t), library).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "file too short")
}

func TestSkipsAnONNXRuntimeThatAllUsersMayWrite(t *testing.T) {
	library := aLibrary(t)
	require.NoError(t, os.Chmod(filepath.Dir(filepath.Dir(library)), 0o777))
	_, err := run(t.Context(), &bytes.Buffer{}, []string{library})
	require.ErrorContains(t, err, "not found in any directory above it")
}
