package index

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// If two callers measure a blob at the same time, the later measurement wins.
func TestLastMeasurementWins(t *testing.T) {
	const before, after = 4096, 8192
	var x *Index
	var second sync.WaitGroup
	var disk func(cas.Digest) (int64, error)
	x, err := Open(memoryDir(t),
		Options{MeasureDisk: func(d cas.Digest) (int64, error) { return disk(d) }})
	require.NoError(t, err)
	disk = func(cas.Digest) (int64, error) { return 1, nil }
	b := publish(t, x)
	d := b.Files[0].Digest
	first := true
	disk = func(cas.Digest) (int64, error) {
		if !first {
			return after, nil
		}
		first = false
		remeasure := func() { require.NoError(t, x.Remeasure(d)) }
		if x.db.writing.TryLock() { // no measurement is running
			x.db.writing.Unlock()
			remeasure()
		} else {
			second.Go(remeasure)
		}
		return before, nil
	}
	require.NoError(t, x.Remeasure(d))
	second.Wait()
	accounted, _, err := x.DiskBytes(d)
	require.NoError(t, err)
	require.EqualValues(t, after, accounted)
	require.NoError(t, x.Close())
}
