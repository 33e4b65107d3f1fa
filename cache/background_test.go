package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// endsClaim is a job of applications' that brings nothing, and never got as far as a claim.
type endsClaim struct{ now chan struct{} }

func (endsClaim) facts() jobFacts { return jobFacts{claim: true} }

func (e endsClaim) run(context.Context, *flight) (*compiled, error) {
	<-e.now
	return nil, &claimEnd{text: "test"}
}

func TestBackgroundOutlivesAClaimThatIsYetToBeGiven(t *testing.T) {
	b, g := jobbing(t, 1)
	job := b.later1(1, somebody).Job
	key := flightKey{build: b.jobs(somebody)[0].Build, scope: "shared"}
	_, err := b.cache.CancelJobs(context.Background(), Peer{UID: somebody}, []string{job}, false)
	require.NoError(t, err)
	before := len(g.begun())

	claim := endsClaim{make(chan struct{})}
	_, first, err := b.cache.flights.send(key, asking{uid: b.cache.uid}, func() (runner, error) { return claim, nil })
	require.NoError(t, err)
	require.True(t, first)
	b.later1(1, somebody)
	require.Equal(t, JobQueued, b.jobs(somebody)[0].State)
	close(claim.now)
	b.begins(g, before+1)
	close(g.pass)
}
