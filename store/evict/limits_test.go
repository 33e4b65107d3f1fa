package evict

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// Old is what was not used for longer than it may, however long ago it was made.
func TestAgeIsMeasuredFromTheLastUse(t *testing.T) {
	m := few(index.Brief{Created: present.Add(-300 * day)},
		index.Brief{Created: present.Add(-300 * day)},
		index.Brief{Created: present.Add(-300 * day)})
	m.builds[0].Use.Last = present.Add(-day)
	m.builds[1].Use.Last = present.Add(-30 * day)
	m.builds[2].Use.Last = present.Add(-30*day - time.Nanosecond)
	require.Equal(t, []string{"remove 3: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: -1, Unused: 30 * day})))
}

// A user may have all of the quota, of which what goes for another reason, and what others have,
// takes nothing.
func TestQuotaCountsRemainingAndNewBuilds(t *testing.T) {
	m := few(index.Brief{Created: present.Add(-9 * day), UID: 7, LogicalBytes: 60},
		index.Brief{Created: present, UID: 7, LogicalBytes: 60, CompileSeconds: 1},
		index.Brief{Created: present, UID: 8, LogicalBytes: 120})
	require.Empty(t, m.plan(t, true, Limits{Bytes: -1, User: 120}).Steps, "to the byte")
	m.byUser = map[uint32]int64{7: 1}
	require.Equal(t, []string{"remove 1: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: -1, User: 120})),
		"what is being stored counts")
	m.byUser = map[uint32]int64{9: 100}
	require.Empty(t, m.plan(t, true, Limits{Bytes: -1, User: 120}).Steps, "and not that of others")
	m.byUser = nil
	m.builds[2].LogicalBytes = 60
	require.Equal(t, []string{"remove 1: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: -1, User: 60, Unused: day})),
		"the first goes for its age, and then the second fits")
}

// A build that is not served is evicted although others have all of its bytes: it is a line in
// every list, and its manifest takes space.
func TestSupersededBuildIsEvictedEvenIfItFreesNothing(t *testing.T) {
	m := few(index.Brief{Created: present.Add(-day), RequestKey: index.RequestKey{9}},
		index.Brief{Created: present, RequestKey: index.RequestKey{9}},
		index.Brief{Created: present})
	m.builds[0].Blobs = m.builds[1].Blobs
	m.blobs[0].whole = 0
	m.spared[index.BuildID{2}], m.spared[index.BuildID{3}] = "in use", "in use"
	require.Equal(t, []string{"remove 1: 0"}, stepTexts(m.plan(t, true, Limits{})))
}

// Copies are dropped before builds that are not served are evicted.
func TestCopiesGoBeforeBuilds(t *testing.T) {
	m := few(index.Brief{Created: present}, index.Brief{Created: present},
		index.Brief{Created: present})
	m.not[index.BuildID{1}] = "stale"
	m.blobs[1] = modelBlob{recipe: 10, unpacked: 50, takes: []int{2}}
	require.Equal(t, []string{"drop copy 2: 50"}, stepTexts(m.plan(t, true, Limits{Bytes: 210})))
	require.Equal(t, []string{"drop copy 2: 50", "remove 1: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: 200})))
}

// Of two builds that have a blob, one of which goes, it is the other that is packed.
func TestEvictedBuildIsNoBaseForPacking(t *testing.T) {
	m := few(index.Brief{Created: present.Add(-day), RequestKey: index.RequestKey{9}},
		index.Brief{Created: present, RequestKey: index.RequestKey{9}},
		index.Brief{Created: present, CompileSeconds: 9})
	m.builds[0].Blobs = m.builds[1].Blobs
	m.blobs[0].whole = 0
	m.blobs[1].saving, m.blobs[1].from = 60, []int{2}
	require.Equal(t, []string{"remove 1: 0", "pack 2: 60"},
		stepTexts(m.plan(t, true, Limits{Bytes: 140, Packs: true})))
}

// Packing never frees more than there is.
func TestPackingNeverCostsMoreThanItSaves(t *testing.T) {
	m := few(index.Brief{Created: present, CompileSeconds: 9}, index.Brief{Created: present})
	m.blobs[1].saving, m.blobs[1].from = 100, []int{0}
	require.Equal(t, []string{"pack 2: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: 150, Packs: true})))
	m.blobs[1].saving = 101
	require.Equal(t, []string{"remove 2: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: 150, Packs: true})))
}

// A base that other builds need does not count as used by those that may be collected; one
// that only the latter need does.
func TestSharedBlobsAreNotOwnBytes(t *testing.T) {
	m := few(index.Brief{Created: present}, index.Brief{Created: present})
	m.blobs[1] = modelBlob{recipe: 10, takes: []int{0}}
	m.builds, m.others = m.builds[1:], m.builds[:1]
	require.EqualValues(t, 10, m.plan(t, false, Limits{Bytes: -1}).Used)
	m.others = nil
	require.EqualValues(t, 110, m.plan(t, false, Limits{Bytes: -1}).Used)
}

// Of builds that pay the same, the least recently used one is evicted first.
func TestEqualValueIsEvictedByLastUse(t *testing.T) {
	m := few(index.Brief{Created: present}, index.Brief{Created: present.Add(-2 * day)},
		index.Brief{Created: present.Add(-day)})
	require.Equal(t, []string{"remove 2: 100", "remove 3: 100", "remove 1: 100"},
		stepTexts(m.plan(t, true, Limits{})))
}

// A build that stayed because others have its bytes is chosen after all when these are evicted, and
// the goal is not reached yet. A sixteenth of what stays is hardly anything, too.
func TestBuildsThatFreeLittleAreEvictedLast(t *testing.T) {
	m := few(index.Brief{Created: present}, index.Brief{Created: present, CompileSeconds: 9e6},
		index.Brief{Created: present, CompileSeconds: 9})
	m.blobs = append(m.blobs, modelBlob{whole: 6})
	m.builds[0].Blobs = append(m.builds[0].Blobs, 3)
	m.blobs[1] = modelBlob{recipe: 1, takes: []int{0}}
	require.Equal(t, []string{"remove 3: 100", "remove 1: 6"},
		stepTexts(m.plan(t, true, Limits{Bytes: 103})),
		"nothing else is left, and the goal is reached with it")
	require.Equal(t, []string{"remove 1: 6", "remove 3: 100", "remove 2: 101"},
		stepTexts(m.plan(t, true, Limits{Bytes: 50})))
	m.blobs[0].whole = 6 * minFreedPart
	require.Equal(t, []string{"remove 3: 100"}, stepTexts(m.plan(t, true, Limits{Bytes: 103})))
}

// Of a user above the quota more is evicted, as whole builds fit into the slack; of other
// users nothing.
func TestSlackOfQuota(t *testing.T) {
	var builds []index.Brief
	for i := range 30 {
		builds = append(builds, index.Brief{Created: present.Add(-time.Duration(60-i) * day),
			UID: 7, LogicalBytes: 10})
	}
	builds = append(builds, index.Brief{Created: present.Add(-90 * day), UID: 8, LogicalBytes: 200})
	gone := func(to Limits) []string {
		m := few(slices.Clone(builds)...)
		plan := m.plan(t, true, to)
		return stepTexts(plan)
	}
	to := Limits{Bytes: -1, User: 290, UserSlack: 29}
	require.Equal(t, []string{"remove 1: 100", "remove 2: 100", "remove 3: 100"}, gone(to),
		"261 are 90 %")
	to.UserSlack = 0
	require.Equal(t, []string{"remove 1: 100"}, gone(to))
	to.User, to.UserSlack = 300, 30
	require.Empty(t, gone(to), "nobody has too much")
	to.User, to.UserSlack = 299, 5
	require.Equal(t, []string{"remove 1: 100"}, gone(to),
		"another one would be more than the slack")
}
