package jobs

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// lane is a queue with a clock of its own.
type lane struct {
	testing.TB
	*Queue
	at    time.Time
	count uint64
}

func newLane(t testing.TB, jobs int, memory int64) *lane {
	l := &lane{TB: t, at: time.Unix(1, 0)}
	l.Queue = NewQueue(jobs, memory, func() time.Time { return l.at })
	return l
}

// comes puts a job of that rank into the queue.
func (l *lane) comes(r Rank, memory int64, users ...uint32) *Ticket {
	l.count++
	t := &Ticket{Number: l.count, Memory: memory, Yield: func() {}}
	l.Enter(t, r, users...)
	return t
}

// order ends the one job that runs again and again, and lists which of the tickets runs next.
func (l *lane) order(tickets ...*Ticket) (order []int) {
	for range tickets {
		i := slices.IndexFunc(tickets,
			func(t *Ticket) bool { return t.runs() && slices.Contains(l.running, t) })
		require.NotEqual(l, -1, i, "nothing runs after %v", order)
		order = append(order, i)
		l.Leave(tickets[i])
	}
	return order
}

const ann, bob, eve = 1, 2, 3

func TestUsersTakeTurnsWithinARank(t *testing.T) {
	l := newLane(t, 1, 0)
	a0, a1, a2 := l.comes(RankWaited, 0, ann), l.comes(RankWaited, 0, ann),
		l.comes(RankWaited, 0, ann)
	asked := l.comes(RankRequested, 0, eve)
	b0, b1 := l.comes(RankWaited, 0, bob), l.comes(RankWaited, 0, bob)
	require.Equal(t, []int{1, 0, 2, 3, 4, 5}, l.positionsOf(b0, a0, a1, b1, a2, asked),
		"as they are listed")
	require.Equal(t, []int{0, 4, 1, 5, 2, 3}, l.order(a0, a1, a2, asked, b0, b1))
}

// positionsOf numbers tickets in the order in which they run.
func (l *lane) positionsOf(tickets ...*Ticket) (out []int) {
	for _, t := range tickets {
		out = append(out, l.position(t))
	}
	return out
}

func TestSharedJobCountsForTheFirstOfItsUsers(t *testing.T) {
	l := newLane(t, 1, 0)
	a0, a1, a2 := l.comes(RankWaited, 0, ann), l.comes(RankWaited, 0, ann),
		l.comes(RankWaited, 0, ann)
	e0 := l.comes(RankWaited, 0, eve)
	l.SetRank(a2, RankWaited, ann, bob)
	require.Equal(t, []int{0, 3, 2, 1}, l.order(a0, a1, a2, e0))
}

func TestLastSlotIsOnLoan(t *testing.T) {
	l := newLane(t, 2, 0)
	a0, a1, a2 := l.comes(RankWaited, 0, ann), l.comes(RankWaited, 0, ann),
		l.comes(RankWaited, 0, ann)
	require.Equal(t, []bool{true, true, false}, []bool{a0.runs(), a1.runs(), a2.runs()},
		"nobody else needs a slot")
	b0, b1 := l.comes(RankWaited, 0, bob), l.comes(RankWaited, 0, bob)
	require.Equal(t, []bool{true, false}, []bool{b0.runs(), b1.runs()},
		"the slot on loan is free for others")
	e0 := l.comes(RankWaited, 0, eve)
	l.Leave(a1)
	require.False(t, e0.runs(), "the two slots are taken")
	l.Leave(a0)
	require.True(t, e0.runs())
	l.Leave(b0)
	require.True(t, a2.runs(), "whose job ended before")
	require.False(t, b1.runs())
}

func TestJobOnLoanIsStoppedForTheMemoryOfAnotherUser(t *testing.T) {
	l := newLane(t, 2, 100)
	stopped := 0
	a0, a1 := l.comes(RankWaited, 40, ann), l.comes(RankWaited, 40, ann)
	a0.Yield, a1.Yield = func() { stopped += 10 }, func() { stopped++ }
	l.comes(RankWaited, 40, ann)
	require.Zero(t, stopped, "not for the user's own")
	b0 := l.comes(RankWaited, 40, bob)
	require.Equal(t, 1, stopped, "the one that began last")
	require.False(t, b0.runs(), "before the other one has ended")
	l.Leave(a1)
	require.True(t, b0.runs())
}

// However others come and go, a job that needs much memory runs eventually.
func TestLargeJobIsNotStarvedByOtherUsers(t *testing.T) {
	l := newLane(t, 2, 100)
	before := l.comes(RankWaited, 10, ann)
	large := l.comes(RankWaited, 100, ann)
	b, e := l.comes(RankWaited, 10, bob), (*Ticket)(nil)
	l.Leave(before)
	require.False(t, large.runs())
	for range 3 {
		e = l.comes(RankWaited, 10, eve)
		require.False(t, e.runs())
		l.Leave(e)
	}
	l.Leave(b)
	require.True(t, large.runs())
}

func (t *Ticket) runs() bool {
	select {
	case <-t.startedRunning:
		return true
	default:
		return false
	}
}

func TestFirstComeFirstServedWithinARank(t *testing.T) {
	l := newLane(t, 1, 0)
	a, b, c := l.comes(RankWaited, 0), l.comes(RankWaited, 0), l.comes(RankWaited, 0)
	require.Equal(t, []bool{true, false, false}, []bool{a.runs(), b.runs(), c.runs()})
	require.Equal(t, []int{0, 1, 2}, []int{l.position(a), l.position(b), l.position(c)})
	l.Leave(b)
	l.Leave(a)
	require.True(t, c.runs())
}

func TestHigherRankGoesFirst(t *testing.T) {
	l := newLane(t, 1, 10)
	busy := l.comes(RankWaited, 10)
	own, asked, waited := l.comes(RankBackground, 1), l.comes(RankRequested, 1),
		l.comes(RankWaited, 10)
	for _, next := range []*Ticket{waited, asked} {
		l.Leave(busy)
		require.True(t, next.runs())
		busy = next
	}
	require.True(t, own.runs(), "it takes no slot, and there is memory for both")
}

func TestSlots(t *testing.T) {
	l := newLane(t, 2, 0)
	own := l.comes(RankBackground, 0)
	b1, b2, b3 := l.comes(RankRequested, 0), l.comes(RankRequested, 0), l.comes(RankRequested, 0)
	require.Equal(t, []bool{true, true, true, false},
		[]bool{own.runs(), b1.runs(), b2.runs(), b3.runs()})
	w1, w2, w3 := l.comes(RankWaited, 0), l.comes(RankWaited, 0), l.comes(RankWaited, 0)
	require.Equal(t, []bool{true, true, false}, []bool{w1.runs(), w2.runs(), w3.runs()},
		"those that run for nobody who waits do not count")
	l.Leave(b1)
	require.False(t, b3.runs())
	l.Leave(w1)
	require.True(t, w3.runs())
	l.Leave(w2)
	l.Leave(w3)
	require.True(t, b3.runs())
}

func TestMemoryIsShared(t *testing.T) {
	l := newLane(t, 8, 100)
	a, b, c := l.comes(RankWaited, 60), l.comes(RankWaited, 50), l.comes(RankWaited, 10)
	require.Equal(t, []bool{true, false, false}, []bool{a.runs(), b.runs(), c.runs()},
		"nobody overtakes the one that needs more")
	l.Leave(a)
	require.True(t, b.runs())
	require.True(t, c.runs())
}

func TestJobAboveTheMemoryBoundRunsAlone(t *testing.T) {
	l := newLane(t, 8, 100)
	small := l.comes(RankWaited, 1)
	large, after := l.comes(RankWaited, 1000), l.comes(RankWaited, 1)
	require.False(t, large.runs())
	l.Leave(small)
	require.True(t, large.runs())
	require.False(t, after.runs())
	l.Leave(large)
	require.True(t, after.runs())
}

func TestRequestTakesMemoryFromBackgroundJobs(t *testing.T) {
	for name, test := range map[string]struct {
		running []Rank // each of 40 bytes, of 100
		need    int64
		yields  []bool
	}{
		"there is enough":         {[]Rank{RankRequested}, 60, []bool{false}},
		"the one that began last": {[]Rank{RankRequested, RankBackground}, 50, []bool{false, true}},
		"both":                    {[]Rank{RankBackground, RankRequested}, 90, []bool{true, true}},
		"more than there is": {[]Rank{RankBackground, RankRequested}, 1000,
			[]bool{true, true}},
		"it would not do": {[]Rank{RankWaited, RankBackground}, 90,
			[]bool{false, false}},
		"the other one waits for it, as well": {[]Rank{RankWaited, RankBackground}, 50,
			[]bool{false, true}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLane(t, 8, 100)
			yields := make([]bool, len(test.running))
			var running []*Ticket
			for i, r := range test.running {
				one := l.comes(r, 40)
				one.Yield = func() { yields[i] = true }
				running = append(running, one)
				require.True(t, one.runs())
			}
			asks := l.comes(RankWaited, test.need)
			require.Equal(t, test.yields, yields)
			for i := range yields {
				if yields[i] {
					require.False(t, asks.runs(), "before the other has ended")
					l.Leave(running[i])
				}
			}
			require.Equal(t, name != "it would not do", asks.runs())
		})
	}
}

func TestARunningJobOnlyRises(t *testing.T) {
	l := newLane(t, 1, 0)
	a := l.comes(RankRequested, 0)
	require.True(t, l.SetRank(a, RankWaited))
	b := l.comes(RankWaited, 0)
	require.False(t, b.runs())
	l.SetRank(a, RankRequested)
	require.False(t, b.runs(), "it runs at the priority that it has got")
	require.False(t, l.SetRank(b, RankRequested))
	c := l.comes(RankWaited, 0)
	l.Leave(a)
	require.True(t, c.runs(), "what nobody waits for any more goes back")
	require.False(t, b.runs())
}

func TestGivingUpLeavesTheQueue(t *testing.T) {
	l := newLane(t, 1, 0)
	a, b := l.comes(RankWaited, 0), l.comes(RankWaited, 0)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, l.Await(ctx, b), context.Canceled)
	require.NoError(t, l.Await(context.Background(), a))
	l.Leave(a)
	require.Empty(t, l.running)
	require.Empty(t, l.waiting)
}

func TestEstimateCountsJobsAhead(t *testing.T) {
	l := newLane(t, 2, 0)
	lengths := []time.Duration{10 * time.Second, 6 * time.Second, 4 * time.Second, 0, time.Minute}
	var tickets []*Ticket
	for _, length := range lengths {
		tickets = append(tickets, l.comes(RankWaited, 0))
		tickets[len(tickets)-1].Length = length
	}
	l.at = l.at.Add(8 * time.Second)
	require.Zero(t, l.EstimateWait(tickets[0]))
	require.Equal(t, time.Second, l.EstimateWait(tickets[2]),
		"2 s of the first are left, and nothing of the second, on two slots")
	require.Equal(t, 3*time.Second, l.EstimateWait(tickets[4]))
}

// With any order of arrivals and departures the bounds hold and every job runs.
func TestBoundsHoldAndAllRun(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	l := newLane(t, 3, 100)
	users := func(r Rank) (users []uint32) {
		for range random.IntN(3) {
			users = append(users, random.Uint32N(4))
		}
		slices.Sort(users)
		if users = slices.Compact(users); r == RankBackground {
			return nil
		}
		return users
	}
	var all []*Ticket
	for step := range 3000 {
		switch runs := slices.DeleteFunc(slices.Clone(all),
			func(one *Ticket) bool { return !one.runs() }); {
		case step < 2000 && random.IntN(2) == 0:
			rank := Rank(random.IntN(3))
			all = append(all, l.comes(rank, random.Int64N(130), users(rank)...))
		case len(all) > 0 && random.IntN(4) == 0:
			rank := Rank(random.IntN(3))
			l.SetRank(all[random.IntN(len(all))], rank, users(rank)...)
		case len(runs) > 0:
			ends := runs[random.IntN(len(runs))]
			l.Leave(ends)
			all = slices.DeleteFunc(all, func(one *Ticket) bool { return one == ends })
		}
		var used int64
		for _, one := range l.running {
			used += one.Memory
		}
		require.LessOrEqual(t, len(l.activityCount), len(all)*2,
			"users are forgotten with their jobs")
		require.True(t, used <= 100 || len(l.running) == 1,
			"step %d of seed %d: %d bytes of %d jobs", step, seed, used, len(l.running))
	}
	for len(all) > 0 {
		i := slices.IndexFunc(all, (*Ticket).runs)
		require.NotEqual(t, -1, i, "nothing runs though %d wait, seed %d", len(all), seed)
		l.Leave(all[i])
		all = slices.Delete(all, i, i+1)
	}
}

// position returns the index of the ticket in the order in which jobs run, the running ones first.
func (q *Queue) position(t *Ticket) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i := slices.Index(q.waiting, t); i >= 0 {
		return i + 1
	}
	return 0
}
