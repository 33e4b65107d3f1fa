package claims

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/portable"
)

// A file with any name is refused or stays below its directory.
func FuzzPutName(f *testing.F) {
	for _, name := range []string{"x.bin", "a/b.bin", "../x", "/x", "a/../../x", "..", ".", "a//b",
		"a/.", `a\..\b`, "x\x00", "\xff", "..x", "a/b/c/d/e", "...", "~", "C:x"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if portable.BadName(name) != "" {
			return
		}
		at := filepath.Join("/store/put-1", filepath.FromSlash(name))
		require.True(t, strings.HasPrefix(at, "/store/put-1/"), at)
		require.Equal(t, "/store/put-1/"+name, at, "one spelling a file")
	})
}

// Sparse files keep their holes when they are staged; all others are hashed during the copy.
func TestStagedPutsKeepTheirHoles(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "state"), 0o700))
	blobs, err := cas.Open(filepath.Join(dir, "state"), cas.Options{})
	require.NoError(t, err)
	for name, hole := range map[string]int64{"dense": 0, "sparse": 64 << 20} {
		from, to := filepath.Join(dir, name), filepath.Join(dir, "out", name)
		f, err := os.Create(from)
		require.NoError(t, err)
		_, err = f.WriteAt([]byte("the end"), hole)
		require.NoError(t, err)
		hashed, err := stagePut(t.Context(), blobs, f, f, to, hole+7)
		require.NoError(t, err)
		require.Equal(t, hole == 0, hashed != cas.Hashed{})
		blocks, err := cas.DiskBytes(to)
		require.NoError(t, err)
		require.Less(t, blocks, int64(1<<20))
		got, err := os.ReadFile(to)
		require.NoError(t, err)
		require.Equal(t, "the end", string(got[hole:]))
		require.NoError(t, f.Close())
	}
}

// A job that is cancelled before it grants the claim grants none. The request has another job then,
// and is not given a claim that ends at once.
func TestACancelledJobGrantsNothing(t *testing.T) {
	const user = 4242
	js := jobs.New(jobs.Options{Slots: 1, Now: time.Now, OnGivenUp: runtimes.ErrGivenUp})
	cs := New(build.New(build.Options{Now: time.Now}),
		func() Limits { return Limits{}.OrDefault() }, nil)
	at := &request.Attempt{Request: &request.Request{Peer: request.Peer{UID: user}},
		Plan: &request.Plan{EPs: []compilers.EP{{Name: "EP"}}}}
	key := jobs.Key{Scope: rights.OwnScope(at.Peer)}
	a := &claimer{Attempt: at, owner: user, wake: func() {}}
	require.NoError(t, cs.addClaimer(key, a))
	running := func() *jobs.Job {
		work := jobs.Func{Work: jobs.Description{Claim: true},
			Do: func(ctx context.Context, _ *jobs.Job) (*jobs.Result, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}}
		j, _, err := js.Start(jobs.Key{Alone: jobs.NewID()}, jobs.Caller{UID: user, Owner: user},
			func() (jobs.Work, error) { return work, nil })
		require.NoError(t, err)
		t.Cleanup(func() { j.GiveUp(0, true) })
		return j
	}
	stopped := running()
	stopped.GiveUp(0, true)
	require.Nil(t, cs.grant(key, stopped, nil))
	require.Nil(t, a.granted)
	cl := cs.grant(key, running(), nil)
	require.NotNil(t, cl, "the request has waited for the next job")
	require.Same(t, cl, a.granted)
	cl.endWithoutResult("", 0)
	cs.forgetClaim(cl)
}

// A caller that cancels the job while it is granted the claim gets none, and the claim ends.
func TestCancelCrossesTheGrant(t *testing.T) {
	for name, cross := range map[string]func(*claim) error{
		"the asker gave up": func(*claim) error { return runtimes.ErrGivenUp },
		"and so did all who asked": func(cl *claim) error {
			cl.endWithoutResult(jobCancelled,
				0)
			return context.Canceled
		},
	} {
		t.Run(name, func(t *testing.T) {
			at := &request.Attempt{Request: &request.Request{Name: "m.onnx"}}
			cl := &claim{Attempt: at, timer: time.NewTimer(time.Hour), deadline: func() {}}
			a, err := (&claimer{Attempt: at}).answerGranted(context.Background(), cl, cross(cl))
			require.Nil(t, a)
			require.Equal(t, apierr.Cancelled, apierr.ClassOf(err))
			require.ErrorContains(t, err, "cancelled")
			require.Equal(t, jobCancelled, cl.endReason())
		})
	}
}
