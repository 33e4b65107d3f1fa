package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// conforming replaces the workers by findings.
func conforming(t *testing.T, findings ...compilers.Finding) *compilers.ConformanceJob {
	var asked compilers.ConformanceJob
	before := conform
	t.Cleanup(func() { conform = before })
	conform = func(_ context.Context, job compilers.ConformanceJob) (compilers.Conformance, error) {
		asked = job
		for _, f := range findings {
			if job.Told != nil {
				job.Told(f)
			}
		}
		return compilers.Conformance{EP: "E", Library: job.EP.Library, ORTVersion: "1.31.1",
			Device: "NPU", Model: "Mul float", Findings: findings}, nil
	}
	return &asked
}

func guidelineIs(name, level, outcome string) compilers.Finding {
	var f compilers.Finding
	f.Section, f.Name, f.Level, f.Page, f.Outcome = "inference", name, level, "https://page", outcome
	f.Calls = append(f.Calls, compilers.GuidelineCall{Call: "CreateSession(m.onnx)",
		Expected: "a session", Happened: "a session", OK: true})
	if outcome == compilers.GuidelineBroken {
		f.Calls = append(f.Calls, compilers.GuidelineCall{Call: "Run", Expected: "numbers",
			Happened: "NaN"})
	}
	return f
}

// aLibrary is a file beside what is called an ONNX Runtime.
func aLibrary(t *testing.T) string {
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "libonnxruntime.so.1.31.1"), nil, 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(folder, "ep"), 0o700))
	library := filepath.Join(folder, "ep", "libe.so")
	require.NoError(t, os.WriteFile(library, nil, 0o600))
	return library
}

func TestProbeConformanceReports(t *testing.T) {
	library := aLibrary(t)
	asked := conforming(t, guidelineIs("one", compilers.Required, compilers.GuidelineHolds),
		guidelineIs("two", "recommended", compilers.GuidelineBroken))
	r := call(t, "probe", "--conformance", library, "--option", "k=v", "--ep", "E:NPU,device=7")
	require.Equal(t, exit.Done, r.code, "what is only recommended: %s", r.err)
	require.Equal(t, `inference
  holds           one
  broken          two (recommended)
      CreateSession(m.onnx): a session
      Run
        expected: numbers
        happened: NaN
      see https://page
E in `+library+`, on NPU, with ONNX Runtime 1.31.1 and models of Mul float:
2 guidelines: 1 hold, 1 broken (0 of them required), 0 not applicable
`, r.out)
	require.Equal(t, compilers.EP{Name: "E", Library: library,
		Options: map[string]string{"k": "v"}, Devices: []compilers.Device{{Type: "NPU",
			DeviceID: 7}}}, asked.EP)
	require.Equal(t, filepath.Dir(filepath.Dir(library)), asked.Runtime.Directory,
		"the nearest above the library")

	conforming(t, guidelineIs("one", compilers.Required, compilers.GuidelineBroken))
	require.Equal(t, exit.Failed, call(t, "probe", "--conformance", library).code)
	r = call(t, "probe", "--json", "--conformance", library)
	require.Equal(t, exit.Failed, r.code)
	var report compilers.Conformance
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	require.Equal(t, "NaN", report.Findings[0].Calls[1].Happened)
	for _, key := range []string{`"guidelines"`, `"section"`, `"level"`, `"outcome"`, `"calls"`,
		`"expected"`, `"happened"`, `"page"`} {
		require.Contains(t, r.out, key)
	}
}

func TestProbeConformanceMistakes(t *testing.T) {
	library := aLibrary(t)
	conforming(t)
	for name, row := range map[string]struct {
		args []string
		code int
		says string
	}{
		"no library": {[]string{"--conformance", library + "x"}, exit.NotFound, "libe.sox"},
		"no ONNX Runtime": {[]string{"--conformance", library, "--runtime",
			filepath.Dir(library)}, exit.Failed, "--runtime DIR"},
		"no ONNX Runtime above": {[]string{"--conformance", "/proc/self/exe"}, exit.Failed,
			`exe": libonnxruntime.so*: not found in any folder above it`},
		"with --find": {[]string{"--conformance", library, "--find"}, exit.BadUsage,
			"--conformance goes with"},
		"option alone": {[]string{"--option", "k=v"}, exit.BadUsage, "go with --conformance"},
		"two EPs": {[]string{"--conformance", library, "--ep", "A", "--ep", "B"},
			exit.BadUsage, "one --ep"},
		"option of nobody": {[]string{"--conformance", library, "--option", "A/k=v"}, exit.BadUsage,
			"there is no --ep A"},
	} {
		t.Run(name, func(t *testing.T) {
			r := call(t, append([]string{"probe"}, row.args...)...)
			require.Equal(t, row.code, r.code, r.err)
			require.Contains(t, r.err, row.says)
		})
	}
}

func TestProbeConformanceSkipsAnONNXRuntimeThatAllUsersMayWrite(t *testing.T) {
	library := aLibrary(t)
	conforming(t)
	require.Equal(t, exit.Done, call(t, "probe", "--conformance", library).code)
	require.NoError(t, os.Chmod(filepath.Dir(filepath.Dir(library)), 0o777))
	r := call(t, "probe", "--conformance", library)
	require.Equal(t, exit.Failed, r.code)
	require.Contains(t, r.err, "not found in any folder above it")
}

// The verb loads the libraries in a worker, and tells what that says: here that they are none.
func TestProbeConformanceRunsTheLibraryInAWorker(t *testing.T) {
	t.Setenv(acquire.WorkerVariable, compilertest.Worker(t))
	r := call(t, "probe", "--conformance", aLibrary(t))
	require.Equal(t, exit.Failed, r.code)
	require.Contains(t, r.err, "file too short")
}
