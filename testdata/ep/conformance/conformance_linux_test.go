//go:build linux && (amd64 || arm64)

package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		child()
	}
	status := m.Run()
	compilertest.RemoveTestEP()
	os.Exit(status)
}

// The oldest and the newest ONNX Runtime that tests with the test EP use.
const oldestORT, newestORT = "1.24.4", "1.31.1"

func jobFor(r compilers.Runtime) job {
	return job{ortLibrary: r.ORTLibrary, ep: compilers.EP{Library: r.EPs[0].Path}, limit: timeLimit}
}

// brokenOf lists the guidelines that do not hold, by the beginnings of their names.
func brokenOf(r Report) (names []string) {
	for _, f := range r.Findings {
		if f.Outcome == Broken {
			name, _, _ := strings.Cut(f.Name, ":")
			names = append(names, f.Section+"/"+name)
		}
	}
	return names
}

// Our own EP keeps every guideline, with the oldest and the newest ONNX Runtime.
func TestConformanceOfTheTestEP(t *testing.T) {
	for _, version := range []string{oldestORT, newestORT} {
		t.Run(version, func(t *testing.T) {
			r := compilertest.TestEPRuntime(t, version, compilertest.Release{})
			t.Parallel()
			result, err := examine(t.Context(), jobFor(r))
			require.NoError(t, err)
			require.Equal(t, compilertest.TestEP, result.EP)
			require.Equal(t, "MatMul float", result.Model)
			require.Equal(t, version, result.ORTVersion)
			require.Greater(t, len(result.Findings), 40)
			for _, f := range result.Findings {
				require.Equal(t, Holds, f.Outcome, "%s: %v", f.Name, f.Calls)
				require.NotEmpty(t, f.Calls)
				require.NotEmpty(t, f.Page)
			}
			require.False(t, result.broken())
		})
	}
}

// The guidelines that real EPs break are known. None of them is required.
func TestConformanceOfRealEPs(t *testing.T) {
	for runtime, want := range map[string][]string{
		"openvino-1.8.1": {
			"plugin library/the library can be registered again after that", // it crashes
			"generation/ep.context_node_name_prefix",
			// it knows inputs by their names
			"generation/contexts of several models can be merged and connected in one model",
			"generation/attributes", // no hardware_architecture
			"inference/a compiled model is not compiled again",
			"inference/ep.enable_weightless_ep_context_nodes",
		},
		"qnn-2.7.0": {
			"plugin library/the registration name can be anything",
			"generation/ep.context_node_name_prefix",
			"generation/attributes", // no hardware_architecture
			"inference/ep.enable_weightless_ep_context_nodes",
			"compatibility/ValidateCompiledModelCompatibilityInfo", // it crashes after a session
			"compatibility/ValidateCompiledModelCompatibilityInfo", // it judges for NPUs only
			"weight sharing/a group loads in order in one process, computes right, and is " +
				"destroyed in reverse",
			"weight sharing/a member alone loads without the option", // on x86 no group loads
		},
	} {
		t.Run(runtime, func(t *testing.T) {
			r := compilertest.Runtime(t, runtime)
			t.Parallel()
			result, err := examine(t.Context(), jobFor(r))
			require.NoError(t, err)
			require.Equal(t, r.EPs[0].EP, result.EP)
			require.Equal(t, want, brokenOf(result))
			require.False(t, result.broken())
		})
	}
}

// Each guideline that an EP breaks is reported with the call, what was expected and what happened.
func TestConformanceFindsBrokenGuidelines(t *testing.T) {
	for name, row := range map[string]struct {
		release  compilertest.Release
		options  map[string]string
		only     string
		outcome  string
		required bool
		call     string
		says     string
	}{
		"it crashes": {compilertest.Release{}, map[string]string{"fault": "crash@load"},
			"the compiled model runs on the EP alone", Broken, true,
			"CreateSession(m_ctx.onnx, session.disable_cpu_ep_fallback=1)", "SIGSEGV"},
		"it hangs": {compilertest.Release{}, map[string]string{"fault": "hang@load"},
			"the compiled model runs on the EP alone", Broken, true,
			"CreateSession(m_ctx.onnx, session.disable_cpu_ep_fallback=1)", "time limit"},
		"it fails": {compilertest.Release{}, map[string]string{"fault": "fail@run"},
			"lifetime: the session that made the model goes on", Broken, true,
			"Run", "asked to fail"},
		"its name is short": {compilertest.Release{Name: "Short"}, nil,
			"GetName ends in ExecutionProvider", Broken, false, "name", "Short"},
		"its verdict is wrong": {compilertest.Release{Verdict: "unsupported"}, nil,
			"ValidateCompiledModelCompatibilityInfo: its own string is optimal", Broken, false,
			"GetModelCompatibilityForEpDevices", "unsupported"},
		"it takes one node": {compilertest.Release{Single: true}, nil,
			"several subgraphs, embedded", "not applicable", false, "", ""},
		"an operator of others": {compilertest.Release{Ops: "Add"}, nil,
			"no EPContext nodes: the normal inference workflow", Holds, false, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.TestEPRuntime(t, newestORT, row.release)
			j := jobFor(r)
			j.ep.Name, j.ep.Options, j.limit = row.release.Name, row.options, 5*time.Second
			j.only = func(name string) bool { return name == row.only }
			result, err := examine(t.Context(), j)
			require.NoError(t, err)
			require.Len(t, result.Findings, 1)
			f := result.Findings[0]
			require.Equal(t, row.outcome, f.Outcome, f.Calls)
			require.Equal(t, row.required, result.broken())
			if row.outcome == Broken {
				last := f.Calls[len(f.Calls)-1]
				require.False(t, last.OK)
				require.Contains(t, last.Call, row.call)
				require.Contains(t, last.Happened, row.says)
				require.NotEmpty(t, last.Expected)
			}
		})
	}
}

func TestConformanceOfALibraryThatIsNoEP(t *testing.T) {
	for name, row := range map[string]struct {
		release compilertest.Release
		says    string
	}{
		"it does not register": {compilertest.Release{Fault: "fail@register"}, "asked to fail"},
		"it has no devices":    {compilertest.Release{Fault: "fail@probe"}, "asked to fail"},
		"it takes nothing": {compilertest.Release{Ops: "none"},
			"makes an EPContext model of none of the models that were tried"},
		"it crashes": {compilertest.Release{Fault: "crash@probe"}, "SIGSEGV"},
	} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.TestEPRuntime(t, newestORT, row.release)
			_, err := examine(t.Context(), jobFor(r))
			require.ErrorContains(t, err, row.says)
		})
	}
}
