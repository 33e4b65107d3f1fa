package evict

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// A packed build with a recipe that takes hardly anything beside what it is packed with frees as
// little: it stays with that, or goes with it.
func TestBuildPackedAgainstAKeptOneStays(t *testing.T) {
	store := func() *model {
		m := few(index.Brief{Created: present, CompileSeconds: 9}, index.Brief{Created: present},
			index.Brief{Created: present, CompileSeconds: 5})
		m.blobs[1] = modelBlob{recipe: 6, takes: []int{0}}
		return m
	}
	require.Equal(t, []string{"remove 3: 100"},
		stepTexts(store().plan(t, true, Limits{Bytes: 150})))
	require.Equal(t, []string{"remove 2: 6", "remove 3: 100", "remove 1: 100"},
		stepTexts(store().plan(t, true, Limits{Bytes: 50})), "all three")
	m := store()
	m.spared[index.BuildID{1}] = "in use"
	plan := m.plan(t, true, Limits{Bytes: 50})
	require.Equal(t, []string{"remove 3: 100"}, stepTexts(plan),
		"the goal is missed with it as well")
	require.Equal(t, "remaining: 1 build of 100 B: in use; 1 build of 6 B: other builds need its "+
		"bytes", plan.KeptText())
	m.spared = nil
	m.blobs[1].recipe = 7
	require.Equal(t, []string{"remove 2: 7"}, stepTexts(m.plan(t, true, Limits{Bytes: 200})),
		"that is something")
}

// Of many that are packed with what stays each frees hardly anything, and all together they do:
// they go though the goal is missed even so.
func TestBuildsPackedAgainstKeptOnesAreEvictedTogether(t *testing.T) {
	m := few(index.Brief{Created: present}, index.Brief{Created: present},
		index.Brief{Created: present})
	m.spared[index.BuildID{1}] = "in use"
	m.blobs[1], m.blobs[2] = modelBlob{recipe: 6, takes: []int{0}},
		modelBlob{recipe: 6, takes: []int{0}}
	require.Equal(t, []string{"remove 2: 6", "remove 3: 6"},
		stepTexts(m.plan(t, true, Limits{Bytes: 50})))
	require.Equal(t, []string{"remove 2: 6"}, stepTexts(m.plan(t, true, Limits{Bytes: 106})),
		"nothing else is left, and the goal is reached with it")
}

// A build that was chosen first stays where a larger one, which was chosen after it, is enough.
func TestUnneededStepsAreDropped(t *testing.T) {
	m := few(index.Brief{Created: present}, index.Brief{Created: present, CompileSeconds: .01},
		index.Brief{Created: present, CompileSeconds: 9})
	m.blobs[0].whole, m.blobs[1].whole, m.blobs[2].whole = 60, 1, 65
	require.Equal(t, []string{"remove 1: 60", "remove 3: 65"},
		stepTexts(m.plan(t, true, Limits{Bytes: 56})), "not the second")
	require.Equal(t, []string{"remove 3: 65"}, stepTexts(m.plan(t, true, Limits{Bytes: 62})))
	require.Equal(t, []string{"remove 1: 60", "remove 2: 1"},
		stepTexts(m.plan(t, true, Limits{Bytes: 65})), "as long as it is enough, what pays least")
}

// A build that was just stored is not the first that is evicted for its user's quota, whatever it
// is worth: it stays for a while even where no other may be evicted. Where a build is being stored,
// that is the newest.
func TestTheNewestBuildIsKeptForAMinute(t *testing.T) {
	store := func(age time.Duration) *model {
		return few(index.Brief{Created: present.Add(-day), CompileSeconds: 9, UID: 7,
			LogicalBytes: 60},
			index.Brief{Created: present.Add(-age), UID: 7, LogicalBytes: 60})
	}
	to := Limits{Bytes: -1, User: 70}
	require.Equal(t, []string{"remove 1: 100"}, stepTexts(store(time.Second).plan(t, true, to)))
	require.Equal(t, []string{"remove 2: 100"}, stepTexts(store(newestGrace).plan(t, true, to)))
	m := store(time.Second)
	m.spared[index.BuildID{1}] = "in use"
	plan := m.plan(t, true, to)
	require.Empty(t, plan.Steps)
	require.Equal(t, "remaining: 1 build of 100 B: in use, though uid 7 has more than its quota "+
		"of 70 B; 1 build of 100 B: just stored", plan.KeptText())
	m = store(time.Second)
	m.byUser = map[uint32]int64{7: 10}
	plan = m.plan(t, true, to)
	require.Equal(t, []string{"remove 2: 100"}, stepTexts(plan))
	require.Contains(t, plan.Steps[0].Reason(),
		"uid 7 has more than its quota of 70 B: least valuable")
	m.builds = m.builds[:1]
	m.spared[index.BuildID{1}] = "in use"
	m.byUser[7] = 11
	require.Equal(t, "remaining: 1 build of 100 B: in use, though uid 7 would have more than "+
		"its quota of 70 B with a new build", m.plan(t, true, to).KeptText())
}
