package evict

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/index"
)

// plan makes a plan for a model, and checks that WhySpared is called at most once for a build.
func (m *model) plan(t require.TestingT, whole bool, to Limits) *Plan {
	asked := make(map[index.BuildID]bool)
	s := &Snapshot{At: m.at, Builds: slices.Clone(m.builds), Whole: whole, Inventory: m.inventory(),
		NotServed: m.not, Pinned: m.pinned, Storing: m.byUser,
		WhySpared: func(b *index.Brief) string {
			require.False(t, asked[b.ID], "asked again about %v", b.ID)
			asked[b.ID] = true
			return m.spared[b.ID]
		}}
	return s.Plan(to)
}

func drawLimits(t *rapid.T) Limits {
	to := Limits{Bytes: rapid.Int64Range(-1, 600).Draw(t, "bytes"),
		Packs: rapid.Bool().Draw(t, "packs")}
	if rapid.Bool().Draw(t, "floor") {
		to.Missing = rapid.Int64Range(0, 400).Draw(t, "missing")
	}
	if rapid.Bool().Draw(t, "aged") {
		to.Unused = time.Duration(rapid.IntRange(1, 60).Draw(t, "unused")) * day
	}
	if rapid.Bool().Draw(t, "quota") {
		to.User = rapid.Int64Range(1, 300).Draw(t, "user")
	}
	return to
}

// carryOut does to the model what the plan says.
func (m *model) carryOut(t require.TestingT, plan *Plan) {
	for i := range plan.Steps {
		s := &plan.Steps[i]
		b := m.build(s.ID)
		switch s.Action {
		case Evict:
			m.remove(s.ID)
		case DropCopy:
			for _, at := range b.Blobs {
				if m.mayShrink(int(at)) {
					m.blobs[at].unpacked = 0
				}
			}
		case PackBuild:
			for _, at := range b.Blobs {
				m.pack(int(at))
			}
		}
		m.sweep()
		for at := range m.blobs {
			if m.needed(at) {
				require.Positive(t, m.blobs[at].whole+m.blobs[at].recipe,
					"blob %d is needed, and gone", at)
			}
			for _, base := range m.blobs[at].takes {
				require.Positive(t, m.blobs[base].whole, "the recipe of %d takes from %d",
					at, base)
			}
		}
	}
}

// mayShrink: no build that needs the blob prevents it.
func (m *model) mayShrink(at int) bool {
	minds := func(b index.Brief) bool { return slices.Contains(b.Blobs, uint32(at)) }
	return !slices.ContainsFunc(m.others, minds) &&
		!slices.ContainsFunc(m.builds, func(b index.Brief) bool {
			return m.spared[b.ID] != "" && minds(b)
		})
}

// pack packs a blob where that frees space, where those that it would take from are whole and no
// recipe takes from it.
func (m *model) pack(at int) {
	b := &m.blobs[at]
	if b.saving == 0 || b.whole < b.saving || !m.mayShrink(at) {
		return
	}
	for i := range m.blobs {
		if slices.Contains(m.blobs[i].takes, at) {
			return
		}
	}
	for _, from := range b.from {
		if m.blobs[from].whole == 0 {
			return
		}
	}
	b.recipe, b.whole, b.saving, b.takes = b.whole-b.saving, 0, 0, slices.Clone(b.from)
}

// Carrying out a plan gives what it promises, and it keeps to the limits wherever possible; it
// evicts no build in hand.
func TestPlanFreesTheStatedBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawModel(t)
		to := drawLimits(t)
		whole := len(m.others) == 0
		plan := m.plan(t, whole, to)
		require.EqualValues(t, len(m.builds), plan.Considered)

		after := m.clone()
		before := after.sweep()
		if whole {
			require.Equal(t, before, plan.Used)
		}
		after.carryOut(t, plan)
		require.Equal(t, plan.Freed, before-after.sweep(), "freed in all")
		sum := int64(0)
		evicted := make(map[index.BuildID]bool)
		for i := range plan.Steps {
			s := &plan.Steps[i]
			sum += s.Frees
			require.Equal(t, "planned", s.Outcome)
			require.Empty(t, m.spared[s.ID], "step %d", i)
			if s.Action == Evict {
				require.False(t, evicted[s.ID], "twice")
				evicted[s.ID] = true
			} else {
				require.Positive(t, s.Frees)
				require.False(t, s.Must)
			}
		}
		require.Equal(t, sum, plan.Freed)
		m.checkGoal(t, to, plan)
		m.checkLimits(t, to, after, evicted)
		kept := uint64(0)
		for _, k := range plan.Kept {
			kept += k.Builds
		}
		require.Equal(t, len(m.builds), int(kept)+len(evicted), "every build goes or stays")
		if whole {
			stays := plan.Freed
			for _, k := range plan.Kept {
				stays += k.Bytes
				require.NotEqual(t, keptNotStored, k.Reason, "all builds are planned for")
			}
			require.Equal(t, plan.Used, stays, "what goes and what stays is all there is")
		}
	})
}

// checkGoal: the goal is the stricter one; it is missed only where nothing more may go; and nothing
// goes for room after it was reached.
func (m *model) checkGoal(t *rapid.T, to Limits, plan *Plan) {
	goal := to.Bytes
	if to.Missing > 0 && (goal < 0 || plan.Used-to.Missing < goal) {
		goal = max(plan.Used-to.Missing, 0)
	}
	require.Equal(t, goal, plan.Goal)
	if goal < 0 {
		require.Zero(t, plan.Short)
		require.False(t, slices.ContainsFunc(plan.Steps, func(s Step) bool { return !s.Must }),
			"there is no goal")
		return
	}
	require.Equal(t, max(plan.Used-plan.Freed-goal, 0), plan.Short)
	for i := len(plan.Steps) - 1; i >= 0; i-- {
		if s := &plan.Steps[i]; !s.Must {
			require.Greater(t, plan.Used-plan.Freed+s.Frees, goal, "the last step was not needed")
			break
		}
	}
	if plan.Short == 0 {
		return
	}
	left := m.clone()
	left.carryOut(t, plan)
	takes, bearable := left.sweep(), int64(0)
	counted := make(map[int]bool)
	count := func(at int) {
		if !counted[at] {
			counted[at] = true
			bearable += left.blobs[at].whole + left.blobs[at].recipe + left.blobs[at].unpacked
		}
	}
	for _, b := range left.builds {
		if m.spared[b.ID] == "" {
			for _, at := range b.Blobs {
				count(int(at))
				for _, base := range left.blobs[at].takes {
					count(base)
				}
			}
			left.remove(b.ID)
		}
	}
	require.LessOrEqual(t, (takes-left.sweep())*minFreedPart, bearable,
		"the goal is missed, and removing more builds would have freed something")
}

func (m *model) checkLimits(t *rapid.T, to Limits, after *model,
	evicted map[index.BuildID]bool) {
	has, may := make(map[uint32]int64), make(map[uint32]bool)
	for _, b := range after.builds {
		free := m.spared[b.ID] == ""
		if to.Unused > 0 && free {
			require.LessOrEqual(t, m.at.Sub(lastUse(&b)), to.Unused, "too old")
		}
		has[b.UID] += b.LogicalBytes
		// the newest one stays for a while
		may[b.UID] = may[b.UID] || free && m.at.Sub(b.Created) >= newestGrace
	}
	for uid, bytes := range has {
		if to.User > 0 && may[uid] {
			require.LessOrEqual(t, bytes+m.byUser[uid], to.User, "the quota of %d", uid)
		}
	}
}

func lastUse(b *index.Brief) time.Time {
	if b.Use.Last.Before(b.Created) {
		return b.Created
	}
	return b.Use.Last
}

// For room what is not served goes before what is, and what pays more stays; whatever the store is.
func TestLeastValuableIsEvictedFirst(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawModel(t)
		plan := m.plan(t, true, Limits{Bytes: 0})
		class := -1
		for _, s := range plan.Steps {
			if s.Action != Evict {
				continue
			}
			of := int(s.why.class)
			if of < classServed {
				of = classSuperseded // in one go, with those that are not served first
			}
			require.GreaterOrEqual(t, of, class, "%v", s.Reason())
			class = of
		}
	})
}

// Where all is needed by one build each, and the whole is equal, a build that is used more or cost
// more to compile goes later.
func TestWorth(t *testing.T) {
	list := []index.Brief{
		{CompileSeconds: 9, Use: index.Usage{Hits: 9, Last: present}},
		{CompileSeconds: 9, Use: index.Usage{Hits: 9, Last: present.Add(-60 * day)}},
		{CompileSeconds: 1, Use: index.Usage{Hits: 9, Last: present}},
		{CompileSeconds: 9, Use: index.Usage{Hits: 1, Last: present}},
		{CompileSeconds: 9, Use: index.Usage{Hits: 9, Last: present}},
	}
	m := &model{at: present, blobs: make([]modelBlob, len(list)),
		not: map[index.BuildID]string{{5}: "stale"}}
	for i := range list {
		list[i].ID, list[i].RequestKey, list[i].Blobs = index.BuildID{byte(i + 1)},
			index.RequestKey{byte(i)}, []uint32{uint32(i)}
		m.blobs[i].whole = 100
	}
	m.builds = list
	var order []byte
	plan := m.plan(t, true, Limits{})
	for _, s := range plan.Steps {
		order = append(order, s.ID[0])
	}
	require.Equal(t, []byte{5, 2, 3, 4, 1}, order)
	require.Equal(t, "not served: it is stale", plan.Steps[0].Reason())
	require.Equal(t,
		"least valuable for its size: 9s of compiling, 9 hits, last used 2025-12-31T00:00:00Z",
		plan.Steps[1].Reason())
}

// A build's own bytes are what removing it alone would free, and all parts together are what there
// is.
func TestAccountsAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawModel(t)
		m.builds, m.others = slices.Concat(m.builds, m.others), nil
		inv := m.inventory()
		var list []*index.Brief
		parts := 0.0
		for i := range m.builds {
			list = append(list, &m.builds[i])
			for _, at := range m.builds[i].Blobs {
				parts += inv.perBuild(at)
			}
		}
		before := m.clone().sweep()
		require.InDelta(t, before, parts, 1e-6)
		for _, row := range inv.NewAccounts(list).ByModel(list) {
			less := m.clone()
			less.remove(row.ID)
			require.Equal(t, before-less.sweep(), row.Own, "of %v", row.ID)
		}
		for _, by := range []func(*index.Brief) string{
			func(b *index.Brief) string { return fmt.Sprint(b.UID) },
			func(*index.Brief) string { return "all" },
		} {
			for _, sum := range inv.NewAccounts(list).SumsBy(list, by) {
				less := m.clone()
				for _, b := range list {
					if by(b) == sum.Name {
						less.remove(b.ID)
					}
				}
				require.Equal(t, before-less.sweep(), sum.Own, "of %s", sum.Name)
			}
		}
	})
}

// few is a store of some builds, numbered from 1, that have an entry and a blob of 100 bytes each.
func few(builds ...index.Brief) *model {
	m := &model{at: present, blobs: make([]modelBlob, len(builds)),
		spared: make(map[index.BuildID]string), not: make(map[index.BuildID]string)}
	for i := range builds {
		b := &builds[i]
		b.ID, b.Blobs = index.BuildID{byte(i + 1)}, []uint32{uint32(i)}
		if b.RequestKey == (index.RequestKey{}) {
			b.RequestKey = index.RequestKey{byte(i + 1)}
		}
		m.blobs[i].whole = 100
	}
	m.builds = builds
	return m
}

// stepTexts lists the steps of a plan: the action, the build and its bytes.
func stepTexts(plan *Plan) (out []string) {
	for _, s := range plan.Steps {
		out = append(out, fmt.Sprintf("%v %d: %d", s.Action, s.ID[0], s.Frees))
	}
	return out
}

// Builds that are not served are evicted first, then superseded ones, whatever they are worth.
func TestClasses(t *testing.T) {
	key := index.RequestKey{9}
	m := few(
		index.Brief{Created: present, CompileSeconds: 1},
		index.Brief{Created: present.Add(-day), CompileSeconds: 5, RequestKey: key},
		index.Brief{Created: present, CompileSeconds: 9, RequestKey: key},
		index.Brief{Created: present, CompileSeconds: 9})
	m.not[index.BuildID{4}] = "invalid"
	plan := m.plan(t, true, Limits{})
	require.Equal(t, []string{"remove 4: 100", "remove 2: 100", "remove 1: 100", "remove 3: 100"},
		stepTexts(plan))
	require.Equal(t, "replaced by the build of 2026-03-01T00:00:00Z", plan.Steps[1].Reason())

	m.builds[1].Use = index.Usage{Last: present.Add(time.Hour), Hits: 1}
	plan = m.plan(t, true, Limits{})
	require.Equal(t, "remove 1: 100", stepTexts(plan)[1],
		"who is used after a newer one was made is not superseded by it")

	m = few(index.Brief{Created: present, CompileSeconds: 9},
		index.Brief{Created: present, CompileSeconds: 9})
	m.builds[0].Use = index.Usage{Hits: 1, Last: present}
	require.Empty(t, m.plan(t, true, Limits{Bytes: -1, Unused: day}).Steps,
		"what was just made is not old, used or not")
}

// Recipes take from the first build's blob, whose build is in hand: removing the first would free
// nothing.
func TestBuildsThatFreeNothingStay(t *testing.T) {
	m := few(index.Brief{Created: present}, index.Brief{Created: present})
	m.blobs[1] = modelBlob{recipe: 10, takes: []int{0}}
	m.spared[index.BuildID{2}] = "in use"
	plan := m.plan(t, true, Limits{})
	require.Empty(t, plan.Steps)
	require.EqualValues(t, 110, plan.Short)
	require.Equal(t, "remaining: 1 build of 110 B: in use; 1 build of 0 B: other builds need its "+
		"bytes", plan.KeptText())
}

// Nearly all that the first build has the second is packed with: the first goes with it, or stays.
func TestBuildsThatFreeHardlyAnythingStay(t *testing.T) {
	store := func() *model {
		m := few(index.Brief{Created: present}, index.Brief{Created: present, CompileSeconds: 5},
			index.Brief{Created: present, CompileSeconds: 9})
		m.blobs = append(m.blobs, modelBlob{whole: 4})
		m.builds[0].Blobs = append(m.builds[0].Blobs, 3)
		m.blobs[1] = modelBlob{recipe: 10, takes: []int{0}}
		return m
	}
	m := store()
	require.Equal(t, []string{"remove 2: 10"}, stepTexts(m.plan(t, true, Limits{Bytes: 210})),
		"not the first, with which the goal is not reached")
	require.Equal(t, []string{"remove 1: 4", "remove 2: 110"},
		stepTexts(m.plan(t, true, Limits{Bytes: 150})), "both")
	m.spared[index.BuildID{2}] = "in use"
	plan := m.plan(t, true, Limits{Bytes: 100})
	require.Equal(t, []string{"remove 3: 100"}, stepTexts(plan))
	require.EqualValues(t, 14, plan.Short)
	require.Equal(t, "remaining: 1 build of 110 B: in use; 1 build of 4 B: other builds need its "+
		"bytes", plan.KeptText())
	m.blobs[3].whole = 40
	require.Equal(t, []string{"remove 1: 40"}, stepTexts(m.plan(t, true, Limits{Bytes: 210})),
		"that is something")
}

// Where a user has too much and none of it may go, what stays says so; that of others does not.
func TestUnreachableQuotasAreReported(t *testing.T) {
	m := few(index.Brief{Created: present.Add(-day), UID: 7, LogicalBytes: 60},
		index.Brief{Created: present.Add(-day), UID: 7, LogicalBytes: 60},
		index.Brief{Created: present.Add(-day), UID: 8, LogicalBytes: 40})
	m.spared[index.BuildID{1}], m.spared[index.BuildID{2}], m.spared[index.BuildID{3}] = "in use",
		"pinned", "in use"
	plan := m.plan(t, true, Limits{Bytes: -1, User: 50})
	require.Empty(t, plan.Steps)
	require.Equal(t, "remaining: 1 build of 100 B: in use, though uid 7 has more than its quota "+
		"of 50 B; 1 build of 100 B: not needed for the goal; "+
		"1 build of 100 B: pinned, though uid 7 has more than its quota of 50 B", plan.KeptText())
	delete(m.spared, index.BuildID{1})
	plan = m.plan(t, true, Limits{Bytes: -1, User: 60})
	require.Equal(t, []string{"remove 1: 100"}, stepTexts(plan))
	require.NotContains(t, plan.KeptText(), "quota", "it is kept to")
}

// A build that is evicted in the end is neither packed nor freed of its copy before, and what that
// would have freed counts for its removal.
func TestNoDetours(t *testing.T) {
	m := few(index.Brief{Created: present}, index.Brief{Created: present},
		index.Brief{Created: present})
	m.spared[index.BuildID{1}] = "in use"
	m.blobs[1].saving, m.blobs[1].from = 60, []int{0}
	m.blobs[2] = modelBlob{recipe: 10, unpacked: 50, takes: []int{0}}
	require.Equal(t, []string{"drop copy 3: 50", "pack 2: 60"},
		stepTexts(m.plan(t, true, Limits{Bytes: 150, Packs: true})))
	require.Equal(t, []string{"drop copy 3: 50", "remove 2: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: 160})))
	require.ElementsMatch(t, []string{"remove 2: 100", "remove 3: 60"},
		stepTexts(m.plan(t, true, Limits{Packs: true})))
}

func TestStepOutcomes(t *testing.T) {
	m := few(index.Brief{Created: present, CompileSeconds: 1},
		index.Brief{Created: present, CompileSeconds: 2})
	plan := m.plan(t, true, Limits{Bytes: 50})
	require.Equal(t, []string{"remove 1: 100", "remove 2: 100"}, stepTexts(plan))
	require.EqualValues(t, 2, plan.Count(Evict))
	plan.Freed = 0
	require.False(t, plan.GoalReached(100))
	require.True(t, plan.GoalReached(150))
	plan.NoteDone(&plan.Steps[0], 90)
	plan.Steps[1].NoteKept("in use")
	plan.Finish()
	require.Equal(t, []string{"removed", "kept: in use"},
		[]string{plan.Steps[0].Outcome, plan.Steps[1].Outcome})
	require.Equal(t, []string{"", "in use"},
		[]string{plan.Steps[0].KeptReason(), plan.Steps[1].KeptReason()})
	require.EqualValues(t, 1, plan.Count(Evict))
	require.EqualValues(t, 60, plan.Short)
	require.Equal(t, "remaining: 1 build of 100 B: in use", plan.KeptText())
}

// There is one level of recipes: nothing is packed that would take from what is packed already, or
// that recipes take from.
func TestRecipesDoNotTakeFromPackedBlobs(t *testing.T) {
	m := few(index.Brief{Created: present},
		index.Brief{Created: present.Add(-day), CompileSeconds: 9},
		index.Brief{Created: present, CompileSeconds: 8})
	m.blobs[0].saving, m.blobs[0].from = 60, []int{1}
	m.blobs[1].saving, m.blobs[1].from = 60, []int{2}
	require.Equal(t, []string{"pack 2: 60", "remove 1: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: 200, Packs: true})))
	m.builds[0].Created, m.builds[0].CompileSeconds,
		m.builds[2].CompileSeconds = present.Add(-2*day), 9, 0
	require.Equal(t, []string{"pack 1: 60", "remove 3: 100"},
		stepTexts(m.plan(t, true, Limits{Bytes: 200, Packs: true})))
}
