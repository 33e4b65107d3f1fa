package rules_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
)

func TestMain(m *testing.M) {
	code := m.Run()
	compilertest.RemoveWorker()
	os.Exit(code)
}

// made is a release's build, and what is known of the release.
type made struct {
	name    string
	runtime compilers.Runtime
	ep      compilers.EP
	graph   string
	facts   rules.Facts
}

func makeBuild(t *testing.T, c *compilers.ORT, name string, ep compilers.EP) made {
	m := made{name: name, runtime: compilertest.Runtime(t, name), ep: ep}
	eps := []compilers.EP{ep}
	prints, err := c.Fingerprint(t.Context(), m.runtime, eps, nil)
	require.NoError(t, err)
	p := prints[0]
	m.facts = rules.Facts{EP: ep.Name, EPVersion: p.EPVersion, SDKVersion: p.SDKVersion,
		HardwareArchitecture: p.HardwareArchitecture,
		CompatibilityString:  p.CompatibilityString, DriverVersion: p.DriverVersion,
		ORTVersion: m.runtime.ORTVersion}
	dir := t.TempDir()
	model := filepath.Join(dir, "00112233445566.onnx")
	require.NoError(t, os.WriteFile(model, tinymodel.Relu(), 0o600))
	done, err := c.Compile(t.Context(),
		compilers.Job{Runtime: m.runtime, EPs: eps, Model: model, Dir: dir,
			Output: "00112233445566_ctx.onnx"}, nil)
	require.NoError(t, err)
	m.graph = filepath.Join(dir, done.Graph)
	return m
}

// The shipped rules say of each pair of releases what the vendor's own libraries do, and what these
// answer when they refuse is taken for stale.
func TestShippedRulesAgreeWithTheLibraries(t *testing.T) {
	for ep, names := range map[string][]string{
		"OpenVINOExecutionProvider": {"openvino-1.4.0", "openvino-1.8.0-ort-1.28.0",
			"openvino-1.8.1"},
		"QNNExecutionProvider": {"qnn-2.5.0", "qnn-2.7.0"},
	} {
		t.Run(ep, func(t *testing.T) {
			c := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
			t.Cleanup(func() { require.NoError(t, c.Close()) })
			of := compilers.EP{Name: ep}
			if ep == "QNNExecutionProvider" {
				of.Options = map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}
			}
			var all []made
			for _, name := range names {
				all = append(all, makeBuild(t, c, name, of))
			}
			for _, build := range all {
				for _, now := range all {
					// a release's own builds are the same library's, and no rule is asked
					if build.name != now.name {
						requireRuleMatchesEP(t, c, build, now)
					}
				}
			}
		})
	}
}

func requireRuleMatchesEP(t *testing.T, c *compilers.ORT, build, now made) {
	check, err := c.Check(t.Context(),
		compilers.CheckJob{Runtime: now.runtime, EPs: []compilers.EP{now.ep}, Graph: build.graph})
	require.NoError(t, err)
	j := rules.Shipped().Judge(build.facts, now.facts)
	if check.Outcome == compilers.Passed {
		require.Contains(t, []compilers.Verdict{compilers.Optimal, compilers.PreferRecompilation},
			j.Verdict, "%s loads %s: %s", now.name, build.name, j.Reason)
		return
	}
	require.Equal(t, compilers.Unsupported, j.Verdict, "%s refuses %s (%s): %s", now.name,
		build.name, check.Text, j.Reason)
	class := rules.Shipped().Classify(now.ep.Name, check.Code, check.Text)
	require.Equal(t, rules.Stale, class.Name, "%s refuses %s: %s", now.name, build.name,
		class.Reason)
}
