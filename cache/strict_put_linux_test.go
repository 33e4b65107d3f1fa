package cache

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

// twoORT is a bench of two runtimes with equal libraries and another ONNX Runtime each, and a
// strict request for the second, of a model for which the first holds a claim.
func twoORT(t *testing.T) (b *bench, first, strict *request.Request, claim *request.Answer,
	put *claims.Put) {
	other := filepath.Join(t.TempDir(), "other")
	_, err := standin.Library(other, "1.30.0", standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	b = newBenchWith(t,
		func(o *Options) { o.Runtimes = append(o.Runtimes, compilers.Runtime{Directory: other}) })
	app := &application{bench: b, uid: b.cache.uid, worker: standin.New()}
	app.spec, err = compilers.Find(b.runtime)
	require.NoError(t, err)
	first = b.request(b.model(1))
	first.OnMiss = request.ForClaim
	claim = b.acquire(first)
	require.Equal(t, request.Claimed, claim.Outcome)
	strict = b.request(first.Graph)
	strict.StrictORT, strict.Runtime = true, runtimes.Ref{Directory: other}
	return b, first, strict, claim, app.compile(first, claim.Claim)
}

// A put from an application with another ONNX Runtime does not serve a waiting request that is
// strict about it: that one is granted the claim next, or the daemon compiles.
func TestStrictORTSkipsPutsOfAnotherORT(t *testing.T) {
	for onMiss, outcome := range map[request.OnMiss]string{request.ForClaim: request.Claimed,
		request.Wait: request.Compiled} {
		t.Run(outcome, func(t *testing.T) {
			b, first, strict, _, put := twoORT(t)
			strict.OnMiss = onMiss
			waits := b.asked(strict)
			a, err := b.cache.Claims.Put(context.Background(), first.Peer, put, nil)
			require.NoError(t, err)
			defer a.View.Close()
			require.Equal(t, "1.31.1", a.Build.ORTVersion)
			got := <-waits
			require.NoError(t, got.err)
			require.Equal(t, outcome, got.answer.Outcome)
		})
	}
}

func TestStrictORTIsCompiledInTheBackgroundAllTheSame(t *testing.T) {
	b, first, strict, _, put := twoORT(t)
	strict.OnMiss = request.Background
	later := b.acquire(strict)
	require.Equal(t, request.Later, later.Outcome)
	a, err := b.cache.Claims.Put(context.Background(), first.Peer, put, nil)
	require.NoError(t, err)
	defer a.View.Close()
	require.Eventually(t, func() bool {
		strict.OnMiss = request.Fail
		got, err := b.cache.Acquire(context.Background(), strict, nil)
		if err == nil {
			got.View.Close()
		}
		return err == nil && got.Build.ORTVersion == "1.30.0"
	}, soon, time.Millisecond)
}

// A strict claimant puts an artefact of the runtime's own ONNX Runtime, because a look-up would not
// return any other.
func TestStrictClaimTakesNothingOfAnotherORT(t *testing.T) {
	b, _, strict, claim, put := twoORT(t)
	strict.OnMiss = request.ForClaim
	require.NoError(t, b.cache.Claims.GiveUp(strict.Peer, claim.Claim.ID, "", 0))
	own := b.acquire(strict)
	require.Equal(t, request.Claimed, own.Outcome)
	put.Claim = own.Claim.ID
	_, err := b.cache.Claims.Put(context.Background(), strict.Peer, put, nil)
	require.Equal(t, apierr.BadRequest, apierr.ClassOf(err))
	require.ErrorContains(t, err,
		`strict_ort: it was compiled with ONNX Runtime "1.31.1", `+
			`and the claim is for builds of "1.30.0"`)
}
