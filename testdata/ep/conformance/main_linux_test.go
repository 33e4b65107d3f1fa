//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/workerproto"
)

func call(t *testing.T, args ...string) (string, error) {
	var out bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

// aLibrary is a file beside what is called an ONNX Runtime.
func aLibrary(t *testing.T) string {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "libonnxruntime.so.1.31.1"), nil, 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "ep"), 0o700))
	library := filepath.Join(dir, "ep", "libe.so")
	require.NoError(t, os.WriteFile(library, nil, 0o600))
	return library
}

func TestReportNamesTheCause(t *testing.T) {
	finding := func(name, level string, calls ...Call) Finding {
		return Finding{Guideline{"inference", name, "https://page", level}, Broken, "", calls}
	}
	f := finding("two", Recommended, Call{"CreateSession(m.onnx)", "a session", "a session", true},
		Call{"Run", "numbers", "NaN", false})
	holds := finding("one", Required)
	holds.Outcome = Holds
	r := Report{EP: "E", Library: "/libe.so", ORTVersion: "1.31.1", Device: "NPU",
		Model: "Mul float", Findings: []Finding{holds, f}}
	var out bytes.Buffer
	printFinding(&out, holds)
	printFinding(&out, f)
	printSummary(&out, r)
	require.Equal(t, `  holds           one
  broken          two (recommended)
      CreateSession(m.onnx): a session
      Run
        expected: numbers
        happened: NaN
      see https://page
E in /libe.so, on NPU, with ONNX Runtime 1.31.1 and models of Mul float:
2 guidelines: 1 hold, 1 broken (0 of them required), 0 not applicable
`, out.String())
	require.False(t, r.broken())
}

func TestReportAsJSON(t *testing.T) {
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	out, err := call(t, r.EPs[0].Path, "--json", "--option", "fault=fail@run")
	require.ErrorIs(t, err, errBroken)
	var report Report
	require.NoError(t, json.Unmarshal([]byte(out), &report))
	require.Equal(t, compilertest.TestEP, report.EP)
	require.NotEmpty(t, brokenOf(report))
	for _, key := range []string{`"guidelines"`, `"section"`, `"level"`, `"outcome"`, `"calls"`,
		`"expected"`, `"happened"`, `"page"`} {
		require.Contains(t, out, key)
	}
}

func TestFlags(t *testing.T) {
	library := aLibrary(t)
	j, err := newJob(library, "", "E:NPU,device=7,vendor=0x8086,k=v", []string{"a=b=c"})
	require.NoError(t, err)
	require.Equal(t, workerproto.EP{Name: "E", Library: library,
		Options: map[string]string{"a": "b=c"}, Devices: []compilers.Device{{Type: "NPU",
			DeviceID: 7, VendorID: 0x8086, Metadata: map[string]string{"k": "v"}}}}, j.ep)
	require.Equal(t, filepath.Dir(filepath.Dir(library)), filepath.Dir(j.ortLibrary),
		"the nearest above the library")
}

func TestMistakes(t *testing.T) {
	library := aLibrary(t)
	for name, row := range map[string]struct {
		args []string
		says string
	}{
		"no library":    {[]string{library + "x"}, "libe.sox"},
		"two libraries": {[]string{library, library}, "accepts 1 arg"},
		"no ONNX Runtime": {[]string{library, "--runtime", filepath.Dir(library)},
			"--runtime DIR"},
		"no ONNX Runtime above": {[]string{"/proc/self/exe"},
			`exe": libonnxruntime.so*: not found in any directory above it`},
		"no option":           {[]string{library, "--option", "k"}, `"k" is not K=V`},
		"no device":           {[]string{library, "--ep", "E:"}, `"E:" is not EP[:DEVICE]`},
		"no id":               {[]string{library, "--ep", "E:device=NPU"}, "not an id"},
		"no libraries at all": {[]string{library}, "file too short"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := call(t, row.args...)
			require.ErrorContains(t, err, row.says)
		})
	}
}

func TestSkipsAnONNXRuntimeThatAllUsersMayWrite(t *testing.T) {
	library := aLibrary(t)
	require.NoError(t, os.Chmod(filepath.Dir(filepath.Dir(library)), 0o777))
	_, err := call(t, library)
	require.ErrorContains(t, err, "not found in any directory above it")
}
