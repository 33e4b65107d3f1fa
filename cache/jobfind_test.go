package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
)

func TestAJobIsFoundByTheBeginningOfItsIDEvenAfterItsEnd(t *testing.T) {
	b, g := jobbing(t, 1)
	id := b.later1(1, somebody).Job
	b.begins(g, 1)
	find := func(uid uint32, name string) (state string, err error) {
		f, _, err := b.cache.JobList.Find(request.Peer{UID: uid}, name)
		if f == nil {
			return "", err
		}
		require.Equal(t, id, f.ID)
		return f.Info().State, nil
	}
	requireFound := func(state string) {
		t.Helper()
		for _, name := range []string{id, id[:12], id[:8]} {
			got, err := find(somebody, name)
			require.NoError(t, err)
			require.Equal(t, state, got, name)
			_, err = find(somebodyElse, name)
			require.Equal(t, apierr.NotFound, apierr.ClassOf(err),
				"others' jobs are found by nobody")
		}
	}
	requireFound(jobs.Running)
	close(g.pass)
	require.Equal(t, jobs.Done, b.follow(somebody, id).State)
	requireFound(jobs.Done)
	require.Equal(t, jobs.Done, b.follow(somebody, id[:6]).State)
	_, err := find(somebody, "")
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
}

func TestJobsThatBeginEqually(t *testing.T) {
	b, g := jobbing(t, 1)
	defer close(g.pass)
	begin := make(map[byte]int)
	for seed := range uint64(17) { // of 16 first digits one comes twice
		begin[b.later1(seed+1, somebody).Job[0]]++
	}
	for digit, n := range begin {
		if n == 1 {
			continue // but for the probe, which is a job, too
		}
		_, _, err := b.cache.JobList.Find(request.Peer{UID: somebody}, string(digit))
		require.Equal(t, apierr.BadRequest, apierr.ClassOf(err))
		require.ErrorContains(t, err, "jobs have this prefix")
	}
}

func TestUsersSeeTheirNameOfASharedModel(t *testing.T) {
	b, g := jobbing(t, 1)
	for uid, name := range map[uint32]string{somebody: "mine.onnx", somebodyElse: "theirs.onnx"} {
		r := b.laterRequest(1, uid)
		r.Name = name
		_, err := b.cache.Acquire(context.Background(), r, nil)
		require.NoError(t, err)
	}
	b.begins(g, 1)
	for uid, name := range map[uint32]string{somebody: "mine.onnx", somebodyElse: "theirs.onnx"} {
		listed := b.jobs(uid)
		require.Len(t, listed, 1)
		require.Equal(t, name, listed[0].ModelName)
	}
	id := b.jobs(somebody)[0].ID
	close(g.pass)
	require.Equal(t, "theirs.onnx", b.follow(somebodyElse, id).ModelName)
	require.Equal(t, "mine.onnx", b.follow(somebody, id).ModelName)
}
