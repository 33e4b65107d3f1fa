package cache

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/compilers/standin"
)

func TestCostOutlivesTheDaemon(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	info, err := b.model(1).Stat()
	require.NoError(t, err)
	_, before := b.cache.jobs.Costs.Estimate(jobs.Kind{EPs: []string{standin.EP},
		Size: info.Size()})
	require.GreaterOrEqual(t, before.Seconds(), a.Build.CompileSeconds)
	b.reopen()
	_, after := b.cache.jobs.Costs.Estimate(jobs.Kind{EPs: []string{standin.EP}, Size: info.Size()})
	require.Equal(t, before, after)
}
