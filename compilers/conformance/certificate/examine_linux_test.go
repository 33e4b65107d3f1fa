//go:build linux && (amd64 || arm64)

package certificate

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/workerproto"
)

func TestMain(m *testing.M) {
	status := m.Run()
	compilertest.RemoveTestEP()
	compilertest.RemoveWorker()
	os.Exit(status)
}

// The oldest and the newest ONNX Runtime that tests with the test EP use.
const oldestORT, newestORT = "1.24.4", "1.31.1"

func jobFor(t *testing.T, r compilers.Runtime, ids ...string) Job {
	j := Job{Worker: compilertest.Conformance(t), ORTLibrary: r.ORTLibrary, Limit: TimeLimit,
		EP: compilers.EP{Library: r.EPs[0].Path}, Suite: "1.2.3"}
	if len(ids) > 0 {
		j.Only = func(g Guideline) bool { return slices.Contains(ids, g.ID) }
	}
	return j
}

func brokenOf(c Certificate) (ids []string) {
	for _, f := range c.Findings {
		if f.Outcome == workerproto.Broken {
			ids = append(ids, f.ID)
		}
	}
	return ids
}

func TestEveryGuidelineStandsForAPage(t *testing.T) {
	all, _, err := guidelines()
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, g := range all {
		require.False(t, seen[g.ID], g.ID)
		seen[g.ID] = true
		require.Contains(t, Levels, g.Level, g.ID)
		require.Contains(t, []string{"", "self", "older", "newer"}, g.First, g.ID)
		require.NotEmpty(t, g.Says, g.ID)
		if g.ID == "deterministic" {
			require.Empty(t, g.Page)
			require.Contains(t, g.Says, "no page")
			continue
		}
		require.Regexp(t, `^https://(onnxruntime\.ai/docs|github\.com/microsoft/onnxruntime)/`,
			g.Page, g.ID)
	}
}

// Our own EP keeps every guideline, with the oldest and the newest ONNX Runtime. One of the older
// versions makes builds that load, the other one such that are too old.
func TestCertificateOfTheTestEP(t *testing.T) {
	for version, older := range map[string]string{oldestORT: "2.3.0", newestORT: "1.0.0"} {
		t.Run(version, func(t *testing.T) {
			r := compilertest.TestEPRuntime(t, version, compilertest.Release{SDK: "2.4.0"})
			old := compilertest.TestEPRuntime(t, version, compilertest.Release{SDK: older})
			t.Parallel()
			j := jobFor(t, r)
			j.Older, j.EP.Options = old.EPs[0].Path, map[string]string{"target": "sim-1"}
			c, err := Examine(t.Context(), j)
			require.NoError(t, err)
			require.Greater(t, len(c.Findings), 50)
			for _, f := range c.Findings {
				require.Equal(t, workerproto.Holds, f.Outcome, "%s: %v", f.Name, f.Calls)
				require.NotEmpty(t, f.Calls)
			}
			require.Empty(t, c.BrokenLevel())
			require.Equal(t, compilertest.TestEP, c.EP)
			require.Equal(t, "MatMul float", c.Model)
			require.Equal(t, version, c.ORTVersion)
			require.Equal(t, j.EP.Options, c.Options)
			require.Equal(t, "1.2.3", c.Suite)
			require.Equal(t, "1.0", c.Driver)
			require.Equal(t, "sim-1", c.Hardware)
			require.NotEmpty(t, c.Compatibility)
			require.Contains(t, c.Host, "linux")
			_, err = time.Parse(time.RFC3339, c.Date)
			require.NoError(t, err)
			for _, l := range []*Library{&c.Library, c.Older} {
				require.Regexp(t, regexp.MustCompile(`^[0-9a-f]{64}$`), l.SHA256)
				require.NotEmpty(t, l.Version)
				require.NotEmpty(t, l.Vendor)
			}
			require.NotEqual(t, c.Library.SHA256, c.Older.SHA256)
			require.Equal(t, []string{"2.4.0", older}, []string{c.Library.SDK, c.Older.SDK})
		})
	}
}

// Each mutant of the test EP breaks the guideline that is about it, and with few others.
func TestCertificateFindsMutants(t *testing.T) {
	outside := filepath.Join(os.TempDir(), "epcached-conformance-leak")
	t.Cleanup(func() { _ = os.Remove(outside) })
	for name, row := range map[string]struct {
		release compilertest.Release
		options map[string]string
		broken  []string
		level   string
		says    string
	}{
		"it returns FAIL everywhere": {compilertest.Release{Mutant: "plain errors"}, nil,
			[]string{"invalidgraph", "mismatch"}, Required, "ort error 1:"},
		"it ignores a flipped bit": {compilertest.Release{}, map[string]string{"check": "0"},
			[]string{"flippedbit"}, Recommended, "a session"},
		"it writes to the working directory": {compilertest.Release{Mutant: "leak leaked"}, nil,
			[]string{"writes"}, Recommended, "/cwd/leaked"},
		"it writes to the temporary directory": {compilertest.Release{Mutant: "leak " + outside},
			nil, []string{"writes"}, Recommended, filepath.Base(outside)},
		"it writes paths into artefacts": {compilertest.Release{Mutant: "paths"}, nil,
			[]string{"paths"}, Recommended, "onnx_model_filename"},
		"no two builds are equal": {compilertest.Release{Mutant: "unequal"}, nil,
			[]string{"deterministic"}, Recommended, "they differ from byte"},
		"every build is optimal": {compilertest.Release{Verdict: "optimal"}, nil,
			[]string{"foreign", "graded"}, Recommended, "optimal"},
	} {
		t.Run(name, func(t *testing.T) {
			row.release.SDK = "2.0.0"
			r := compilertest.TestEPRuntime(t, newestORT, row.release)
			old := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{SDK: "1.0.0"})
			t.Parallel()
			j := jobFor(t, r, "creates", "broken", "invalidgraph", "flippedbit", "writes", "paths",
				"deterministic", "optimal", "foreign", "mismatch", "graded", "source")
			j.Older, j.EP.Options = old.EPs[0].Path, row.options
			if row.options != nil {
				j.Older = "" // it does not know the option's other meaning either
			}
			c, err := Examine(t.Context(), j)
			require.NoError(t, err)
			require.Equal(t, row.broken, brokenOf(c), "%v", c.Findings)
			require.Equal(t, row.level, c.BrokenLevel())
			for _, f := range c.Findings {
				if f.Outcome == workerproto.Broken {
					require.Contains(t, f.Calls[len(f.Calls)-1].Happened, row.says)
				}
			}
		})
	}
}

// An EP without EPContext gets the part about plugin libraries.
func TestCertificateWithoutEPContext(t *testing.T) {
	for name, row := range map[string]struct {
		release compilertest.Release
		options map[string]string
		broken  []string
	}{
		"it makes no EPContext nodes": {compilertest.Release{Mutant: "contextless"}, nil, nil},
		"it takes nothing":            {compilertest.Release{Ops: "none"}, nil, nil},
		"it fails to compile": {compilertest.Release{},
			map[string]string{"fault": "fail@compile"}, []string{"creates"}},
		"it crashes when it compiles": {compilertest.Release{},
			map[string]string{"fault": "crash@compile"}, []string{"creates"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.TestEPRuntime(t, newestORT, row.release)
			t.Parallel()
			j := jobFor(t, r, "registers", "vendor", "creates", "embedded", "optimal", "group")
			j.EP.Options = row.options
			c, err := Examine(t.Context(), j)
			require.NoError(t, err)
			require.Len(t, c.Findings, 6)
			require.Equal(t, row.broken, brokenOf(c))
			for i, f := range c.Findings {
				switch {
				case i < 2:
					require.Equal(t, workerproto.Holds, f.Outcome)
				case len(row.broken) == 0 || i > 2:
					require.Equal(t, workerproto.NotApplicable, f.Outcome)
					require.Contains(t, f.Reason, "EPContext model")
				}
			}
		})
	}
}

// The guidelines that real EPs break are known. None of them is required.
func TestCertificatesOfRealEPs(t *testing.T) {
	for runtime, row := range map[string]struct {
		older  string
		broken []string
	}{
		"openvino-1.8.1": {"openvino-1.6.1", []string{
			"reregisters", // it crashes
			"prefix",
			"merged",       // it knows inputs by their names
			"sdk",          // no hardware_architecture
			"invalidgraph", // its code is EP_FAIL
			"nottwice", "weightless",
			"downgrade", // 1.6.1 takes no node of it: FAIL
		}},
		"qnn-2.7.0": {"qnn-2.5.0", []string{
			"anyname", "prefix",
			"sdk", // no hardware_architecture
			"weightless",
			"optimal",             // it crashes after a session
			"foreign",             // it judges for NPUs only
			"loadgroup", "member", // on x86 no group loads
		}},
	} {
		t.Run(runtime, func(t *testing.T) {
			r, old := compilertest.Runtime(t, runtime), compilertest.Runtime(t, row.older)
			t.Parallel()
			j := jobFor(t, r)
			j.Older = old.EPs[0].Path
			c, err := Examine(t.Context(), j)
			require.NoError(t, err)
			require.Equal(t, r.EPs[0].EP, c.EP)
			require.Equal(t, row.broken, brokenOf(c))
			require.Equal(t, Recommended, c.BrokenLevel())
			require.NotEqual(t, c.Library.SDK, c.Older.SDK)
			for _, f := range c.Findings {
				if f.ID == "mismatch" {
					require.Equal(t, workerproto.Holds, f.Outcome, f.Reason)
				}
			}
		})
	}
}

// Each guideline that an EP breaks is reported with the call, what was expected and what happened.
func TestCertificateFindsBrokenGuidelines(t *testing.T) {
	for name, row := range map[string]struct {
		release compilertest.Release
		options map[string]string
		only    string
		outcome string
		level   string
		call    string
		says    string
	}{
		"it crashes": {compilertest.Release{}, map[string]string{"fault": "crash@load"}, "alone",
			workerproto.Broken, Required,
			"CreateSession(m_ctx.onnx, session.disable_cpu_ep_fallback=1)", "SIGSEGV"},
		"it hangs": {compilertest.Release{}, map[string]string{"fault": "hang@load"}, "alone",
			workerproto.Broken, Required,
			"CreateSession(m_ctx.onnx, session.disable_cpu_ep_fallback=1)", "time limit"},
		"it fails": {compilertest.Release{}, map[string]string{"fault": "fail@run"}, "lifetime",
			workerproto.Broken, Required, "Run", "asked to fail"},
		"its name is short": {compilertest.Release{Name: "Short"}, nil, "name",
			workerproto.Broken, Recommended, "name", "Short"},
		"its verdict is wrong": {compilertest.Release{Verdict: "unsupported"}, nil, "optimal",
			workerproto.Broken, Recommended, "GetModelCompatibilityForEpDevices", "unsupported"},
		"it takes one node": {compilertest.Release{Single: true}, nil, "embeddedparts",
			workerproto.NotApplicable, "", "", ""},
		"an operator of others": {compilertest.Release{Ops: "Add"}, nil, "normal",
			workerproto.Holds, "", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.TestEPRuntime(t, newestORT, row.release)
			j := jobFor(t, r, row.only)
			j.EP.Name, j.EP.Options, j.Limit = row.release.Name, row.options, 5*time.Second
			c, err := Examine(t.Context(), j)
			require.NoError(t, err)
			require.Len(t, c.Findings, 1)
			f := c.Findings[0]
			require.Equal(t, row.outcome, f.Outcome, f.Calls)
			require.Equal(t, row.level, c.BrokenLevel())
			if row.outcome == workerproto.Broken {
				last := f.Calls[len(f.Calls)-1]
				require.False(t, last.OK)
				require.Contains(t, last.Call, row.call)
				require.Contains(t, last.Happened, row.says)
				require.NotEmpty(t, last.Expected)
			}
		})
	}
}

func TestCertificateOfALibraryThatIsNoEP(t *testing.T) {
	for name, row := range map[string]struct {
		release compilertest.Release
		says    string
	}{
		"it does not register": {compilertest.Release{Fault: "fail@register"}, "asked to fail"},
		"it has no devices":    {compilertest.Release{Fault: "fail@probe"}, "asked to fail"},
		"it crashes":           {compilertest.Release{Fault: "crash@probe"}, "SIGSEGV"},
	} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.TestEPRuntime(t, newestORT, row.release)
			_, err := Examine(t.Context(), jobFor(t, r))
			require.ErrorContains(t, err, row.says)
			require.True(t, strings.HasPrefix(err.Error(), "conformance of "), err)
		})
	}
}
