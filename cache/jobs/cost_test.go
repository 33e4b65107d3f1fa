package jobs

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

const ep = "OpenVINOExecutionProvider"

func ofSize(size int64) Kind { return Kind{[]string{ep}, size} }

// notes are memos that last as long as the test.
type notes map[string][]byte

func (n notes) Get(key []byte) ([]byte, bool) { value, ok := n[string(key)]; return value, ok }

func (n notes) Save(key, value []byte) error { n[string(key)] = value; return nil }

func noCosts() (*Costs, notes) {
	n := make(notes)
	cs := NewCosts(n, slog.New(slog.DiscardHandler))
	return &cs, n
}

func TestCostOfAModelThatWasNeverCompiled(t *testing.T) {
	costs, _ := noCosts()
	memory, length := costs.Estimate(ofSize(100 * mib))
	require.EqualValues(t, 256*mib+400*mib, memory)
	require.Zero(t, length, "nobody can know")
}

func TestCostIsLearntByProviderAndSize(t *testing.T) {
	costs, _ := noCosts()
	costs.Learn(ofSize(100*mib), 8*time.Second, 1000*mib, 0, false)
	for name, test := range map[string]struct {
		facts  Kind
		memory int64
		length time.Duration
	}{
		"of like size":          {ofSize(120 * mib), 1000 * mib, 8 * time.Second},
		"four times as large":   {ofSize(400 * mib), 4000 * mib, 32 * time.Second},
		"a quarter of it":       {ofSize(25 * mib), 1000 * mib, 2 * time.Second},
		"of quite another size": {ofSize(1 * mib), 260 * mib, 0},
		"of another provider":   {Kind{[]string{"QNNExecutionProvider"}, 100 * mib}, 656 * mib, 0},
		"of one provider more": {Kind{[]string{ep, "QNNExecutionProvider"}, 100 * mib}, 656 * mib,
			0},
		"of a sparse file":       {ofSize(1 << 62), 256*mib + 4<<50, 0},
		"of a size that is none": {ofSize(0), 256 * mib, 0},
	} {
		t.Run(name, func(t *testing.T) {
			memory, length := costs.Estimate(test.facts)
			require.Equal(t, test.memory, memory)
			require.Equal(t, test.length, length)
		})
	}
}

func TestCostFollowsTheLatest(t *testing.T) {
	costs, _ := noCosts()
	model := ofSize(mib)
	costs.Learn(model, 10*time.Second, 1000, 0, false)
	costs.Learn(model, 20*time.Second, 3000, 0, false)
	memory, length := costs.Estimate(model)
	require.EqualValues(t, 3000, memory, "the most that one took")
	require.Equal(t, 13*time.Second, length)
	costs.Learn(model, time.Hour, 1000, 0, true)
	memory, length = costs.Estimate(model)
	require.EqualValues(t, 2700, memory)
	require.Equal(t, 13*time.Second, length,
		"at the lowest priority it took as long as the machine was busy")
}

func TestDamagedCostCountsForNothing(t *testing.T) {
	costs, notes := noCosts()
	for name, row := range map[string]string{
		"no JSON":         "{",
		"negative time":   `{"Seconds":-1,"Count":1}`,
		"negative memory": `{"Memory":-5,"Count":1}`,
		"of no job":       `{"Seconds":5}`,
		"endless":         `{"Seconds":1e300,"Count":1}`,
		"more than any":   `{"Memory":9223372036854775807,"Count":1}`,
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t,
				notes.Save([]byte(costKey(ofSize(mib), sizeClass(mib))), []byte(row)))
			memory, length := costs.Estimate(ofSize(mib))
			require.EqualValues(t, 260*mib, memory)
			require.Zero(t, length)
		})
	}
}
