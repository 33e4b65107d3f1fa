package jobs

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/internal/apierr"
)

// blocks is work that ends with its context.
type blocks struct{ about Description }

func (b blocks) Description() Description { return b.about }

func (b blocks) Run(ctx context.Context, _ *Job) (*Result, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func newTestJobs(t *testing.T) *Jobs {
	js := New(Options{Slots: 1, Now: time.Now, OnGivenUp: errors.New("given up")})
	t.Cleanup(js.Close)
	return js
}

func TestPastJobsAreForgotten(t *testing.T) {
	js := newTestJobs(t)
	js.mu.Lock()
	defer js.mu.Unlock()
	for range 2 * maxEnded {
		js.ended = append(js.ended, &Job{jobs: js, ended: js.Now()})
	}
	js.forget()
	require.Len(t, js.ended, maxEnded)
	for _, j := range js.ended {
		j.ended = js.Now().Add(-EndedFor - time.Second)
	}
	js.forget()
	require.Empty(t, js.ended)
}

// Files that are held open for a follow-up job count towards the bound on the user's queued jobs.
func TestFilesHeldOpenForAnHeirCount(t *testing.T) {
	js := newTestJobs(t)
	begin := func() (Work, error) { return blocks{Description{Claim: true}}, nil }
	j, first, err := js.Start(Key{Alone: "claim"}, Caller{UID: 1, Owner: 1}, begin)
	require.NoError(t, err)
	require.True(t, first)
	require.True(t, j.AddFollowUp(FollowUp{UID: 1}, maxKeptFiles))
	require.False(t, j.AddFollowUp(FollowUp{UID: 1}, 1), "it is noted already")
	_, _, err = js.Start(Key{Alone: "other"}, Caller{UID: 1, Owner: 1}, begin)
	require.Equal(t, apierr.Busy, apierr.ClassOf(err))
	_, _, err = js.Start(Key{Alone: "other"}, Caller{UID: 2, Owner: 2}, begin)
	require.NoError(t, err)
}

// A cancelled job is not held by an application: the next request has another job.
func TestACancelledJobIsNotHeld(t *testing.T) {
	js := newTestJobs(t)
	j, _, err := js.Start(Key{Alone: "claim"}, Caller{UID: 1},
		func() (Work, error) { return blocks{}, nil })
	require.NoError(t, err)
	ended := false
	require.True(t, j.KeepFor(2, 2, func() { ended = true }))
	ends, held := j.GiveUp(2, false)
	require.False(t, ends, "another user wants it")
	held()
	require.True(t, ended)
	ends, _ = j.GiveUp(0, true)
	require.True(t, ends)
	require.False(t, j.KeepFor(2, 2, func() {}))
	<-j.Done()
	require.Equal(t, Cancelled, j.Info().State)
}
