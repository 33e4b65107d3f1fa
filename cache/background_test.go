package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
)

// endsClaim is a job of applications' that brings nothing, and never got as far as a claim.
type endsClaim struct{ now chan struct{} }

func (endsClaim) Description() jobs.Description { return jobs.Description{Claim: true} }

func (e endsClaim) Run(ctx context.Context, _ *jobs.Job) (*jobs.Result, error) {
	select {
	case <-e.now:
	case <-ctx.Done():
	}
	return nil, &request.ClaimEnd{Text: "test"}
}

func TestBackgroundOutlivesAClaimThatIsYetToBeGiven(t *testing.T) {
	b, g := jobbing(t, 1)
	job := b.later1(1, somebody).Job
	key := jobs.Key{Build: b.jobs(somebody)[0].Build, Scope: "shared"}
	_, err := b.cache.JobList.Cancel(context.Background(), request.Peer{UID: somebody},
		[]string{job}, false)
	require.NoError(t, err)
	before := len(g.begun())

	claim := endsClaim{make(chan struct{})}
	_, first, err := b.cache.jobs.Start(key, jobs.Caller{UID: b.cache.uid},
		func() (jobs.Work, error) { return claim, nil })
	require.NoError(t, err)
	require.True(t, first)
	b.later1(1, somebody)
	require.Equal(t, jobs.Queued, b.jobs(somebody)[0].State)
	close(claim.now)
	b.begins(g, before+1)
	close(g.pass)
}
