//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/internal/apierr"
)

// withVTCM asks for a model with an option that the compatibility string of the artefact depends
// on, and that of the fingerprint does not.
func (b *bench) withVTCM(seed uint64, miss request.OnMiss) *request.Request {
	options := map[string]string{"enable_htp_fp16_precision": "1", "vtcm_mb": "8"}
	r := b.forQNN(compilertest.DenseModel(seed, 64, 2), "60", options)
	r.OnMiss = miss
	return r
}

// putOf puts for a claim what was compiled in the directory.
func (b *bench) putOf(claim *request.Answer, dir string, made compilers.Result) *claims.Put {
	put := &claims.Put{Claim: claim.Claim.ID, ORTVersion: made.ORTVersion}
	for _, name := range made.Files {
		put.Files = append(put.Files,
			claims.PutFile{Name: name, File: b.openFile(filepath.Join(dir, name))})
	}
	return put
}

// A build states what its graph does, whether the daemon compiled it or an application.
func TestBuildRecordsTheFactsOfItsArtefact(t *testing.T) {
	b, ort, runtime := newQNNBench(t)
	a := b.acquire(b.withVTCM(1, request.Wait))
	stated := b.graphOf(a).CompatibilityInfo()[qnn]
	require.True(t, strings.HasSuffix(stated, ":60:8:0"), stated)
	require.Equal(t, stated, a.Build.EPs[0].CompatibilityString)
	again := b.acquire(b.withVTCM(1, request.Fail))
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, judge.SourceLibrary, again.Compatibility.Source)
	r := b.withVTCM(1, request.Explain)
	require.Empty(t, b.acquire(r).Explanation.Candidates[0].Differences)

	claim := b.acquire(b.withVTCM(2, request.ForClaim))
	require.Equal(t, request.Claimed, claim.Outcome)
	dir := t.TempDir()
	ep := compilers.EP{Name: qnn, Options: claim.ProviderOptions[qnn]}
	made, err := ort.Compile(t.Context(), compilers.Job{Runtime: runtime, EPs: []compilers.EP{ep},
		Model: b.withVTCM(2, request.Wait).Graph.Name(), Dir: dir, Output: claim.Claim.Output,
		Route: claim.Claim.Route}, nil)
	require.NoError(t, err)
	taken, err := b.cache.Claims.Put(t.Context(), b.self(), b.putOf(claim, dir, made), nil)
	require.NoError(t, err)
	defer taken.View.Close()
	require.Equal(t, stated, taken.Build.EPs[0].CompatibilityString)
	require.Equal(t, request.Hit, b.acquire(b.withVTCM(2, request.Fail)).Outcome)
}

// smallVTCM is a machine with an HTP with 4 MB of VTCM.
type smallVTCM struct{ *compilers.ORT }

func (s smallVTCM) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	own *compilers.Job) ([]compilers.Fingerprint, error) {
	marks, err := s.ORT.Fingerprint(ctx, r, eps, own)
	for i := range marks {
		said := &marks[i].CompatibilityString
		*said = strings.Replace(*said, ":60:0:0", ":60:4:0", 1)
	}
	return marks, err
}

// A build's own string states its needs: a machine that has less does not get it.
func TestBuildForMoreVTCMIsRefused(t *testing.T) {
	b, ort, runtime := newQNNBench(t)
	b.acquire(b.withVTCM(1, request.Wait))
	other := b.copies()(t)
	other.change = func(o *Options) {
		o.Compiler, o.Runtimes = smallVTCM{ort}, []compilers.Runtime{runtime}
	}
	// And with it what is remembered of this machine.
	require.NoError(t, os.Remove(filepath.Join(other.state, "index.db")))
	other.openSound()
	e := other.refused(other.withVTCM(1, request.Fail))
	require.Equal(t, apierr.Stale, e.Class)
	require.Contains(t, e.Text, "needs 8 MB of VTCM, this machine has 4 MB")
}
