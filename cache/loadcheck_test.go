package cache

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
)

// Load checks use exactly the options that the answer gives to applications.
func TestLoadCheckUsesTheAnswersOptions(t *testing.T) {
	b := newBench(t)
	var mu sync.Mutex
	var checks []compilers.CheckJob
	b.compiler.CheckFault = func(job compilers.CheckJob) *compilers.CheckResult {
		mu.Lock()
		defer mu.Unlock()
		checks = append(checks, job)
		return nil
	}
	for name, change := range map[string]func(*request.Request){
		"plain": func(*request.Request) {},
		"provider option": func(r *request.Request) {
			r.EPs[0].Options = map[string]string{"level": "3"}
		},
		"session option": func(r *request.Request) {
			r.SessionOptions = map[string]string{"session.disable_quant_qdq": "1"}
		},
		"no optimisation": func(r *request.Request) { r.GraphOptimizationLevel = "disable_all" },
		"all of it":       func(r *request.Request) { r.GraphOptimizationLevel = "all" },
		"dimensions":      func(r *request.Request) { r.FreeDimensions = map[string]int64{"n": 3} },
	} {
		t.Run(name, func(t *testing.T) {
			checks = nil
			r := b.request(b.model(1))
			change(r)
			a := b.acquire(r)
			require.Equal(t, request.Compiled, a.Outcome)
			require.Len(t, checks, 1)
			got := checks[0]
			require.Equal(t, a.ProviderOptions,
				map[string]map[string]string{got.EPs[0].Name: got.EPs[0].Options})
			require.Equal(t, len(a.SessionOptions), len(got.SessionOptions))
			for key, value := range a.SessionOptions {
				require.Equal(t, value, got.SessionOptions[key])
			}
			require.True(t, got.Beside, "the stand-in lists a processor")
			require.Empty(t, got.FreeDimensions,
				"no client gets dimensions: they are fixed in the graph")
		})
	}
}

// A build that loads only without optimisation is served with that in its answer, from its record,
// also after a restart and in its other form.
func TestLoadsOnlyWithoutOptimisation(t *testing.T) {
	b := newBench(t)
	b.compiler.CheckFault = func(compilers.CheckJob) *compilers.CheckResult {
		return &compilers.CheckResult{Outcome: compilers.Passed,
			GraphOptimizationLevel: "disable_all"}
	}
	require.Equal(t, "disable_all", b.acquire(b.form(false)).GraphOptimizationLevel)
	b.compiler.CheckFault = nil
	require.Equal(t, "disable_all", b.acquire(b.form(true)).GraphOptimizationLevel, "converted")
	b.reopen()
	require.Equal(t, "disable_all", b.acquire(b.form(false)).GraphOptimizationLevel)
}
