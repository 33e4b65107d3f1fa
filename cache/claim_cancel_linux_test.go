package cache

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
)

// A claim holder that cancels the job gives the claim up: the next claimant gets it without waiting
// for the deadline.
func TestCancellingTheHoldersPartHandsTheClaimOver(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Publishers = []uint32{stranger, stranger + 1} })
	app := b.application(stranger, "7.1")
	first := app.ask(b.model(1))
	claim := app.claim(first)
	second := app.ask(first.Graph)
	second.Peer.UID = stranger + 1
	waits := b.asked(second)
	listed, err := b.cache.JobList.Cancel(context.Background(), first.Peer, nil, true)
	require.NoError(t, err)
	require.Len(t, listed, 1)
	require.NotEqual(t, jobs.Cancelled, listed[0].State, "somebody else wants it")
	got := <-waits
	require.NoError(t, got.err)
	require.Equal(t, request.Claimed, got.answer.Outcome)
	_, err = b.cache.Claims.Put(context.Background(), first.Peer, app.compile(first, claim.Claim),
		nil)
	require.ErrorContains(t, err, "its job was cancelled")
	app.uid = second.Peer.UID
	require.Equal(t, request.Taken, app.put(app.compile(second, got.answer.Claim)).Outcome)
}

// Applications ask for a claim, and all jobs are cancelled again and again: each ends with a claim
// or cancelled, and nothing is left.
func TestClaimsWhileJobsAreCancelled(t *testing.T) {
	b := newBench(t)
	b.cache.Claims.Limiter.Burst = 1 << 20
	app := b.application(stranger, "7.1")
	model := b.model(1)
	done, cancelled := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(cancelled)
		for {
			select {
			case <-done:
				return
			case <-time.After(time.Duration(rand.IntN(500)) * time.Microsecond):
				if _, err := b.cache.JobList.Cancel(context.Background(),
					request.Peer{UID: stranger}, nil, true); err != nil {
					t.Errorf("cancel: %v", err)
				}
			}
		}
	}()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 40 {
				r := app.ask(model)
				a, err := b.cache.Acquire(context.Background(), r, nil)
				switch {
				case err != nil && apierr.ClassOf(err) != apierr.Cancelled:
					t.Errorf("neither a claim nor cancelled: %v", err)
				case err == nil:
					_ = b.cache.Claims.GiveUp(r.Peer, a.Claim.ID, "", 0) // cancelled, perhaps
				}
			}
		})
	}
	wg.Wait()
	close(done)
	<-cancelled
	require.Eventually(t, func() bool { return b.cache.jobs.Count() == 0 }, soon, time.Millisecond)
	requireNoClaims(b)
}
