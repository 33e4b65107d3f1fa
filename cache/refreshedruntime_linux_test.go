//go:build linux && (amd64 || arm64)

package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/internal/apierr"
)

// forTestEP asks for a model.
func (b *bench) forTestEP() *request.Request {
	path := filepath.Join(b.TempDir(), "m.onnx")
	require.NoError(b, os.WriteFile(path, compilertest.Dense(1, 8, 1), 0o644))
	r := b.request(b.openFile(path))
	r.EPs = []identity.EP{{Name: compilertest.TestEP}}
	return r
}

// elsewhereUpdated changes what the test EP says of itself, but none of its libraries, and has the
// runtime probed again.
func (b *bench) elsewhereUpdated(r compilers.Runtime, release string) {
	b.Helper()
	path := r.EPs[0].Path[:len(r.EPs[0].Path)-len(".so")] + ".release"
	require.NoError(b, os.WriteFile(path, []byte(release), 0o644))
	_, err := b.cache.Queries.Probe(b.Context(), b.self(), runtimes.Ref{}, true)
	require.NoError(b, err)
}

// The SDK is another one though no file of the runtime is: no plan and no verdict of before counts
// any more.
func TestRefreshThatFindsAnotherSDKForgetsVerdicts(t *testing.T) {
	b, _, runtime := newTestEPBench(t)
	first := b.acquire(b.forTestEP())
	require.Equal(t, "1.0.0", first.Build.EPs[0].SDKVersion)
	b.elsewhereUpdated(runtime, "sdk = 1.1.0\n")
	judged := b.acquire(b.forTestEP())
	require.Equal(t, request.Hit, judged.Outcome)
	require.Equal(t, compilers.PreferRecompilation, judged.Compatibility.Verdict)
	b.elsewhereUpdated(runtime, "sdk = 2.0.0\n")
	b.reopen()
	require.Equal(t, "2.0.0", b.probed().Marks[compilertest.TestEP].SDKVersion)
	again := b.acquire(b.forTestEP())
	require.Equal(t, request.Compiled, again.Outcome)
	require.Equal(t, "2.0.0", again.Build.EPs[0].SDKVersion)
	b.elsewhereUpdated(runtime, "sdk = 1.0.0\n")
	back := b.acquire(b.forTestEP())
	require.Equal(t, request.Hit, back.Outcome)
	require.Equal(t, first.Build.ID, back.Build.ID)
	require.Equal(t, compilers.Optimal, back.Compatibility.Verdict)
}

// With an equal library and another driver the execution provider is asked, and where it cannot say
// the build is loaded once.
func TestAnotherDriverIsJudged(t *testing.T) {
	for name, c := range map[string]struct{ verdict, source, reason string }{
		"optimal": {"optimal", judge.SourceEP, ": optimal"},
		"no verdict": {"not_applicable", judge.SourceLoadCheck,
			"it loads; compiled by an equal library of " +
				compilertest.TestEP + " with driver 1.0, and this machine has 2.0"},
	} {
		t.Run(name, func(t *testing.T) {
			b, _, runtime := newTestEPBench(t)
			first := b.acquire(b.forTestEP())
			require.Equal(t, "1.0", first.Build.EPs[0].DriverVersion)
			b.elsewhereUpdated(runtime, "driver = 2.0\nverdict = "+c.verdict+"\n")
			a := b.acquire(b.forTestEP())
			require.Equal(t, request.Hit, a.Outcome)
			require.Equal(t, first.Build.ID, a.Build.ID)
			require.Equal(t, compilers.Optimal, a.Compatibility.Verdict)
			require.Equal(t, c.source, a.Compatibility.Source)
			require.Contains(t, a.Compatibility.Reason, c.reason)
		})
	}
	t.Run("unsupported", func(t *testing.T) {
		b, _, runtime := newTestEPBench(t)
		b.acquire(b.forTestEP())
		b.elsewhereUpdated(runtime, "driver = 2.0\nverdict = unsupported\n")
		r := b.forTestEP()
		r.OnMiss = request.Fail
		e := b.refused(r)
		require.Equal(t, apierr.Stale, e.Class)
		require.Contains(t, e.Text, ": unsupported")
	})
}
