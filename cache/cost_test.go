package cache

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/standin"
)

const mib = 1 << 20

func ofSize(size int64) *jobFacts { return &jobFacts{eps: []string{standin.EP}, size: size} }

func TestCostOfWhatWasNeverCompiled(t *testing.T) {
	b := newBench(t)
	memory, length := b.cache.flights.costs.estimate(ofSize(100 * mib))
	require.EqualValues(t, 256*mib+400*mib, memory)
	require.Zero(t, length, "nobody can know")
}

func TestCostIsLearntByProviderAndSize(t *testing.T) {
	b := newBench(t)
	costs := &b.cache.flights.costs
	costs.learn(ofSize(100*mib), 8*time.Second, 1000*mib, false)
	for name, test := range map[string]struct {
		facts  *jobFacts
		memory int64
		length time.Duration
	}{
		"of like size":           {ofSize(120 * mib), 1000 * mib, 8 * time.Second},
		"four times as large":    {ofSize(400 * mib), 4000 * mib, 32 * time.Second},
		"a quarter of it":        {ofSize(25 * mib), 1000 * mib, 2 * time.Second},
		"of quite another size":  {ofSize(1 * mib), 260 * mib, 0},
		"of another provider":    {&jobFacts{eps: []string{"QNNExecutionProvider"}, size: 100 * mib}, 656 * mib, 0},
		"of one provider more":   {&jobFacts{eps: []string{standin.EP, "QNNExecutionProvider"}, size: 100 * mib}, 656 * mib, 0},
		"of a sparse file":       {ofSize(1 << 62), 256*mib + 4<<50, 0},
		"of a size that is none": {ofSize(0), 256 * mib, 0},
	} {
		t.Run(name, func(t *testing.T) {
			memory, length := costs.estimate(test.facts)
			require.Equal(t, test.memory, memory)
			require.Equal(t, test.length, length)
		})
	}
}

func TestCostFollowsTheLatest(t *testing.T) {
	b := newBench(t)
	costs, model := &b.cache.flights.costs, ofSize(mib)
	costs.learn(model, 10*time.Second, 1000, false)
	costs.learn(model, 20*time.Second, 3000, false)
	memory, length := costs.estimate(model)
	require.EqualValues(t, 3000, memory, "the most that one took")
	require.Equal(t, 13*time.Second, length)
	costs.learn(model, time.Hour, 1000, true)
	memory, length = costs.estimate(model)
	require.EqualValues(t, 2700, memory)
	require.Equal(t, 13*time.Second, length, "at the lowest priority it took as long as the machine was busy")
}

func TestCostOutlivesTheDaemon(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	info, err := b.model(1).Stat()
	require.NoError(t, err)
	_, before := b.cache.flights.costs.estimate(ofSize(info.Size()))
	require.GreaterOrEqual(t, before.Seconds(), a.Build.CompileSeconds)
	b.reopen()
	_, after := b.cache.flights.costs.estimate(ofSize(info.Size()))
	require.Equal(t, before, after)
}

func TestDamagedCostCountsForNothing(t *testing.T) {
	b := newBench(t)
	for name, row := range map[string]string{
		"no JSON":         "{",
		"negative time":   `{"Seconds":-1,"Count":1}`,
		"negative memory": `{"Memory":-5,"Count":1}`,
		"of no job":       `{"Seconds":5}`,
		"endless":         `{"Seconds":1e300,"Count":1}`,
		"more than any":   `{"Memory":9223372036854775807,"Count":1}`,
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, b.cache.index.SaveMemo(costKey(ofSize(mib), sizeClass(mib)), []byte(row)))
			memory, length := b.cache.flights.costs.estimate(ofSize(mib))
			require.EqualValues(t, 260*mib, memory)
			require.Zero(t, length)
		})
	}
}
