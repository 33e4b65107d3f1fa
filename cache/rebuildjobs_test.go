package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

func TestRebuildJobIsVisibleToUsersOfTheBuild(t *testing.T) {
	b, g := gated(t, nil)
	r := b.request(b.model(1))
	r.Peer.UID = somebody
	first := b.acquire(r)
	b.age()
	g.holding(true)
	b.refreshWith(first.Build, r)
	b.begins(g, 2)
	require.Empty(t, b.jobs(somebodyElse))
	listed := b.jobs(somebody)
	require.Len(t, listed, 1)
	require.Equal(t, "test", listed[0].Why)
	require.True(t, listed[0].Background)
	_, err := b.cache.JobList.Cancel(context.Background(), request.Peer{UID: somebody},
		[]string{listed[0].ID}, false)
	require.Equal(t, apierr.NotAllowed, apierr.ClassOf(err))
	ended, err := b.cache.JobList.Cancel(context.Background(), request.Peer{},
		[]string{listed[0].ID}, false)
	require.NoError(t, err)
	require.Equal(t, jobs.Cancelled, ended[0].State)
	require.Empty(t, b.waitForRebuilds(), "and it is not begun again")
}

// wantedByItself has the daemon want to recompile a build while it must not begin, because a
// request waits.
func wantedByItself(t *testing.T) (b *bench, g *gate, waiting <-chan got, job jobs.Info) {
	b, g = gated(t, nil)
	r := b.request(b.model(1))
	r.Peer.UID = somebody
	first := b.acquire(r)
	b.age()
	g.holding(true)
	waiting = b.ask(context.Background(), b.request(b.model(2)))
	b.begins(g, 2)
	b.refreshWith(first.Build, r)
	require.Empty(t, b.jobs(somebodyElse))
	listed := b.jobs(somebody)
	require.Len(t, listed, 1)
	require.Equal(t, first.RequestKey, listed[0].RequestKey)
	require.Equal(t, jobs.Queued, listed[0].State)
	require.Equal(t, standin.EP, listed[0].EP)
	require.True(t, listed[0].Background)
	require.Len(t, b.jobs(0), 2)
	require.Equal(t, listed[0].ID, b.jobs(0)[1].ID, "behind what a request waits for")
	return b, g, waiting, listed[0]
}

func TestRebuildJobCanBeFollowedFromTheQueueOn(t *testing.T) {
	b, g, waiting, job := wantedByItself(t)
	var h heard
	followed := make(chan jobs.Info, 1)
	go func() {
		j, err := b.cache.JobList.Follow(context.Background(), request.Peer{UID: somebody}, job.ID,
			h.record)
		if err == nil {
			followed <- j
		}
		close(followed)
	}()
	g.pass <- struct{}{}
	b.served(waiting)
	b.begins(g, 3)
	require.Eventually(t, func() bool { return b.followers() == 1 }, soon, time.Millisecond)
	require.Equal(t, job.ID, b.jobs(somebody)[0].ID)
	close(g.pass)
	require.Equal(t, jobs.Done, (<-followed).State)
	require.Contains(t, h.phases(), "compiling")
}

func TestAdministratorsCancelRebuildJobs(t *testing.T) {
	for name, ids := range map[string]func(jobs.Info) []string{
		"by its id": func(j jobs.Info) []string { return []string{j.ID} },
		"all":       func(jobs.Info) []string { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			b, g, waiting, job := wantedByItself(t)
			_, err := b.cache.JobList.Cancel(context.Background(), request.Peer{UID: somebody},
				[]string{job.ID}, false)
			require.Equal(t, apierr.NotAllowed, apierr.ClassOf(err))
			ended, err := b.cache.JobList.Cancel(context.Background(), request.Peer{}, ids(job),
				ids(job) == nil)
			require.NoError(t, err)
			require.Equal(t, jobs.Cancelled, ended[0].State)
			require.Equal(t, job.ID, ended[0].ID)
			require.Empty(t, b.jobs(somebody))
			close(g.pass)
			if one := <-waiting; one.answer != nil {
				one.answer.View.Close()
			}
			require.Empty(t, b.waitForRebuilds())
			require.Len(t, g.begun(), 2)
		})
	}
}

func TestRebuildOfARemovedBuildEnds(t *testing.T) {
	b, _, _, job := wantedByItself(t)
	_, err := b.cache.Remove(context.Background(), request.Peer{}, nil, true, false)
	require.NoError(t, err)
	_, ended, err := b.cache.JobList.AwaitBegin(context.Background(), request.Peer{UID: somebody},
		job)
	require.NoError(t, err)
	require.Equal(t, jobs.Done, ended.State)
	_, err = b.cache.JobList.Cancel(context.Background(), request.Peer{}, nil, true)
	require.NoError(t, err)
}
