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
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/internal/apierr"
)

// A job that is cancelled just before it would grant the claim grants none: who asks then has another job, and is not to be
// given a claim that ends at once.
func TestACancelledJobGrantsNothing(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	at := b.identified(r)
	p, err := b.cache.planner.Own(t.Context(), at)
	require.NoError(t, err)
	a := &claimer{Attempt: at.WithPlan(p), owner: stranger, wake: func() {}}
	key := jobs.Key{Build: p.BuildKey, Scope: rights.OwnScope(r.Peer)}
	require.NoError(t, b.cache.claims.enter(key, a, 16))
	o := b.cache.claims.newOutsider(key, a)
	claimed := func() *jobs.Job {
		j, _, err := b.cache.jobs.Send(jobs.Key{Alone: jobs.NewID()}, jobs.Caller{UID: stranger, Owner: stranger},
			func() (jobs.Work, error) { return endsClaim{make(chan struct{})}, nil })
		require.NoError(t, err)
		t.Cleanup(func() { j.GiveUp(0, true) })
		return j
	}
	stopped := claimed()
	stopped.GiveUp(0, true)
	give := func(f *jobs.Job) *claim {
		return b.cache.claims.grant(key, func(a *claimer) *claim { return o.give(a, f, nil) })
	}
	require.Nil(t, give(stopped))
	require.Nil(t, a.granted)
	cl := give(claimed())
	require.NotNil(t, cl, "who wants it has waited for the next job")
	require.Same(t, cl, a.granted)
	cl.finish("", 0)
	b.cache.claims.remove(cl)
}

// Who gives the job up at the moment at which it is given the claim is given none, and the claim is over.
func TestCancelCrossesTheGrant(t *testing.T) {
	for name, cross := range map[string]func(*claim) error{
		"the asker gave up":        func(*claim) error { return runtimes.ErrGivenUp },
		"and so did all who asked": func(cl *claim) error { cl.finish(jobCancelled, 0); return context.Canceled },
	} {
		t.Run(name, func(t *testing.T) {
			at := &request.Attempt{Request: &request.Request{Name: "m.onnx"}}
			cl := &claim{Attempt: at, timer: time.NewTimer(time.Hour), ends: func() {}}
			a, err := (&claimer{Attempt: at}).handed(context.Background(), cl, cross(cl))
			require.Nil(t, a)
			require.Equal(t, apierr.Cancelled, apierr.ClassOf(err))
			require.ErrorContains(t, err, "cancelled")
			require.Equal(t, jobCancelled, cl.overWhy())
		})
	}
}

// Who holds the claim and cancels the job gives the claim up: the next who asked for it gets it, and waits for no deadline.
func TestCancellingTheHoldersPartHandsTheClaimOver(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Publishers = []uint32{stranger, stranger + 1} })
	app := b.application(stranger, "7.1")
	first := app.ask(b.model(1))
	claim := app.claim(first)
	second := app.ask(first.Graph)
	second.Peer.UID = stranger + 1
	waits := b.asked(second)
	listed, err := b.cache.jobList.Cancel(context.Background(), first.Peer, nil, true)
	require.NoError(t, err)
	require.Len(t, listed, 1)
	require.NotEqual(t, jobs.Cancelled, listed[0].State, "somebody else wants it")
	got := <-waits
	require.NoError(t, got.err)
	require.Equal(t, request.Claimed, got.answer.Outcome)
	_, err = b.cache.Put(context.Background(), first.Peer, app.compile(first, claim.Claim), nil)
	require.ErrorContains(t, err, jobCancelled)
	app.uid = second.Peer.UID
	require.Equal(t, request.Taken, app.put(app.compile(second, got.answer.Claim)).Outcome)
}

// Applications ask for a claim, and all jobs are cancelled again and again: each ends with a claim or cancelled, and nothing is left.
func TestClaimsWhileJobsAreCancelled(t *testing.T) {
	b := newBench(t)
	b.cache.claims.Limiter.Burst = 1 << 20
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
				if _, err := b.cache.jobList.Cancel(context.Background(), request.Peer{UID: stranger}, nil, true); err != nil {
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
					_ = b.cache.claims.GiveUp(r.Peer, a.Claim.ID, "", 0) // cancelled, perhaps
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
