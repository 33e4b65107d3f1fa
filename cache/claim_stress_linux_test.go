package cache

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

// Many applications ask for one model at once; those that get the claim put, give up, leave or say
// nothing until the deadline, at random. At any time one holds it, and all that stay get the
// artefact of the first one that put.
func TestManyApplicationsOneClaim(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	b := newBenchWith(t, func(o *Options) { o.Claims.Deadline = 300 * time.Millisecond })
	app := b.application(stranger, "7.1")
	model := b.model(1)
	var puts atomic.Int64
	var wg sync.WaitGroup
	for i := range 40 {
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		wg.Go(func() {
			one := *app
			one.connect, one.leave = context.WithCancel(context.Background())
			defer one.leave()
			r := one.ask(model)
			a, err := b.cache.Acquire(context.Background(), r, nil)
			if err != nil {
				t.Errorf("asker %d: %v", i, err)
				return
			}
			if a.View != nil {
				a.View.Close()
			}
			if a.Outcome != request.Claimed {
				return
			}
			if puts.Load() > 0 {
				t.Error("a claim was given though there is a build")
			}
			if n, _ := b.cache.Claims.Counts(); n > 1 {
				t.Errorf("%d claims at the same time", n)
			}
			switch fate := random.IntN(8); {
			case i > 30 || fate == 0:
				if err := compileAndPut(&one, r, a.Claim, t.TempDir()); err != nil {
					if time.Now().After(a.Claim.Deadline) {
						return // a slow machine: another has the claim by now
					}
					t.Errorf("asker %d: put: %v", i, err)
					return
				}
				puts.Add(1)
			case fate == 1:
				time.Sleep(350 * time.Millisecond) // the deadline
			case fate < 5:
				if err := b.cache.Claims.GiveUp(r.Peer, a.Claim.ID, "no", 0); err != nil &&
					time.Now().Before(a.Claim.Deadline) {
					t.Errorf("asker %d: give up: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	require.Eventually(t, func() bool { return b.cache.jobs.Count() == 0 }, soon, time.Millisecond)
	require.LessOrEqual(t, puts.Load(), int64(1))
	require.Len(t, b.list(), int(puts.Load()))
	requireNoClaims(b)
}

// requireNoClaims fails if a claim is held or wanted.
func requireNoClaims(b *bench) {
	held, wanted := b.cache.Claims.Counts()
	require.Zero(b, held)
	require.Zero(b, wanted)
}

func compileAndPut(a *application, r *request.Request, claim *request.Claim, dir string) error {
	result, err := a.worker.Compile(context.Background(),
		compilers.Job{Runtime: a.spec,
			EPs:   []compilers.EP{{Name: standin.EP, Library: a.spec.EPs[0].Path}},
			Model: r.Graph.Name(), Dir: dir, Output: claim.Output}, nil)
	put := &claims.Put{Claim: claim.ID}
	for _, name := range result.Files {
		f, openErr := os.Open(filepath.Join(dir, name))
		err = errors.Join(err, openErr)
		put.Files = append(put.Files, claims.PutFile{Name: name, File: f})
	}
	if err == nil {
		var answer *request.Answer
		if answer, err = a.cache.Claims.Put(context.Background(), r.Peer, put, nil); err == nil {
			answer.View.Close()
		}
	}
	for _, f := range put.Files {
		f.File.Close()
	}
	return err
}

// A put that was begun in time is finished after the deadline.
func TestPutBegunInTime(t *testing.T) {
	t.Parallel() // it waits
	// So long that the put begins in time on a busy machine too.
	b := newBenchWith(t, func(o *Options) { o.Claims.Deadline = 4 * time.Second })
	c := newClaimed(b, nil)
	leave, err := b.cache.Claims.Puts.Lock(context.Background(), stranger)
	require.NoError(t, err)
	got, queued := make(chan error, 1), make(chan struct{}, 1)
	go func() {
		progress := func(request.Progress) {
			select {
			case queued <- struct{}{}:
			default:
			}
		}
		a, err := b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, progress)
		if err == nil {
			err = a.View.Close()
		}
		got <- err
	}()
	<-queued
	time.Sleep(time.Until(c.claim.Deadline) + 50*time.Millisecond)
	require.Empty(t, got)
	leave()
	require.NoError(t, <-got)
	require.Len(t, b.list(), 1)
}

// An application that leaves during its put has put nothing, and the end of its connection hands
// the claim over.
func TestAnApplicationDiesInItsPut(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, nil)
	second := *c.application
	second.connect = context.Background()
	next := b.asked(second.ask(c.request.Graph))
	leave, err := b.cache.Claims.Puts.Lock(context.Background(), stranger)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	got, queued := make(chan error, 1), make(chan struct{}, 1)
	go func() {
		_, err := b.cache.Claims.Put(ctx, c.request.Peer, c.put,
			func(request.Progress) { queued <- struct{}{} })
		got <- err
	}()
	<-queued
	cancel()
	c.leave()
	require.Error(t, <-got)
	leave()
	handed := <-next
	require.NoError(t, handed.err)
	require.Equal(t, request.Claimed, handed.answer.Outcome)
	require.Empty(t, b.list())
}

// Cancelling the job ends the claim.
func TestCancelledClaim(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, nil)
	listed, err := b.cache.JobList.Cancel(context.Background(), c.request.Peer, nil, true)
	require.NoError(t, err)
	require.Equal(t, jobs.Cancelled, listed[0].State)
	_, err = b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
	require.ErrorContains(t, err, "cancelled")
}

// A put that fails because the store is full keeps the claim, because space may be freed.
func TestPutOnAFullDisk(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Claims.UserBytes = 10 })
	c := newClaimed(b, nil)
	_, err := b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
	require.Equal(t, apierr.NoSpace, apierr.ClassOf(err))
	b.reload(func(o *Options) { o.Claims.UserBytes = 1 << 20 })
	c.application.put(c.put)
}

// A request that looked just before a build was stored, and asked for a job just after, makes no
// second one.
func TestStoredBetweenLookUpAndJob(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	b.acquire(r)
	at := b.planned(r)
	a, err := b.cache.builder.Compile(t.Context(), at, "it was not there")
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, request.Waited, a.Outcome)
	at.OnMiss = request.ForClaim
	a, err = b.cache.Claims.ClaimOrWait(t.Context(), at, "it was not there")
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, request.Waited, a.Outcome)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}
