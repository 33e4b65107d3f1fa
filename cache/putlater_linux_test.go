package cache

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
)

// crowded is a store that is above its budget with builds that are all in use, and an application that has something to put.
type crowded struct {
	*bench
	claimed *claimed
	inUse   []*Answer
}

func newCrowded(t *testing.T) *crowded {
	b := newBench(t)
	c := &crowded{bench: b, inUse: []*Answer{b.acquire(b.held(100)), b.acquire(b.held(101))}}
	c.claimed = newClaimed(b, func(r *Request) { r.HoldsView = true })
	c.claimed.put.Later = true
	next, now := b.options(), b.account()
	next.Space = SpaceOptions{Budget: Amount{Bytes: now.counted() - 1}}
	require.NoError(t, b.cache.Reload(next))
	return c
}

// queue puts, and requires that it is to be kept later.
func (c *crowded) queue() *Answer {
	c.Helper()
	a, err := c.cache.Put(context.Background(), Peer{UID: stranger}, c.claimed.put, nil)
	require.NoError(c, err)
	require.Equal(c, Queued, a.Outcome)
	return a
}

// makeRoom lets go of what is in use.
func (c *crowded) makeRoom() {
	for _, a := range c.inUse {
		require.NoError(c, a.View.Close())
	}
}

func (c *crowded) noneQueued() {
	c.Helper()
	require.Eventually(c, func() bool { return c.openQueued() == queuedSum{} }, time.Minute, time.Millisecond)
	n, _ := c.cache.places.anyQueued()
	require.Zero(c, n)
}

// openQueued is what counts of the queue.
func (c *crowded) openQueued() (sum queuedSum) {
	s := c.cache.places
	s.mu.Lock()
	defer s.mu.Unlock()
	for q := range s.opened {
		sum.add(q)
	}
	return sum
}

// fillOf has a user's part of the queue full.
func (b *bench) fillOf(uid uint32) {
	b.Helper()
	for range maxQueued / queuedUserPart {
		_, ok := b.cache.queue(b.cache.reports.owners.of(uid), 1, 0, 0, nil)
		require.True(b, ok)
	}
}

// What is put while there is no room is answered, takes no room, and is kept when there is some, though its application has left
// and its files have no names any more. Who asks for the same meanwhile waits for it.
func TestWhatIsPutWithoutRoomIsKeptLater(t *testing.T) {
	c := newCrowded(t)
	before := c.account()
	a := c.queue()
	require.Nil(t, a.View)
	require.Nil(t, a.Build)
	require.NotZero(t, a.RequestKey)
	require.Contains(t, a.Why, "not kept yet: model ")
	require.Contains(t, a.Why, "of the budget of")
	space, err := c.cache.Space()
	require.NoError(t, err)
	require.Equal(t, 1, space.Queued)
	require.Equal(t, int64(4*cas.Block), space.QueuedBytes)
	require.Zero(t, space.Reserved)
	require.Equal(t, before, c.account())
	require.Empty(t, c.staged(), "nothing of it is on the disk")
	jobs := c.jobs(stranger)
	require.Len(t, jobs, 1)
	require.Equal(t, []string{a.Job, JobClaimed, phaseNoRoom}, []string{jobs[0].ID, jobs[0].State, jobs[0].Phase})

	waits := c.asked(c.claimed.ask(c.model(1)))
	c.claimed.leave()
	for _, f := range c.claimed.put.Files {
		require.NoError(t, os.Remove(f.File.Name()))
		require.NoError(t, f.File.Close())
	}
	c.makeRoom()
	got := <-waits
	require.NoError(t, got.err)
	require.Equal(t, Waited, got.answer.Outcome)
	require.True(t, got.answer.Build.Put)
	require.Len(t, c.read(got.answer), 2)
	require.Equal(t, JobDone, c.follow(stranger, a.Job).State)
	c.noneQueued()
	again := c.claimed.ask(c.model(1))
	require.Equal(t, Hit, c.acquire(again).Outcome)
	require.Zero(t, c.cache.index.Counters()["unkept"])
}

// Who does not say that it may be later, and what would never fit, is refused as it comes, and its claim is as it was.
func TestWhatIsNotQueued(t *testing.T) {
	for name, change := range map[string]func(c *crowded) (says string){
		"not asked for": func(c *crowded) string { c.claimed.put.Later = false; return "of the budget of" },
		"never fits": func(c *crowded) string {
			next := c.options()
			next.Space = SpaceOptions{Budget: Amount{Bytes: perBuild}}
			require.NoError(c, c.cache.Reload(next))
			return "and the budget for all is"
		},
		"more than its user may have": func(c *crowded) string {
			next := c.options()
			next.Claims.UserBytes = 1
			require.NoError(c, c.cache.Reload(next))
			return "has put"
		},
		"too many": func(c *crowded) string {
			for i := range maxQueued {
				_, ok := c.cache.queue(uint32(i), 1, 0, 0, nil)
				require.True(c, ok)
			}
			return "of the budget of"
		},
		"too many files": func(c *crowded) string {
			_, ok := c.cache.queue(1, 1, 0, maxQueuedFiles-1, nil)
			require.True(c, ok)
			return "of the budget of"
		},
		"too many bytes": func(c *crowded) string {
			b, err := c.cache.bounds()
			require.NoError(c, err)
			_, ok := c.cache.queue(1, maxQueuedBudgets*b.budget, 0, 0, nil)
			require.True(c, ok)
			return "of the budget of"
		},
		"too many of its user": func(c *crowded) string {
			c.fillOf(stranger)
			return "of the budget of"
		},
		"more than its user may have of builds": func(c *crowded) string {
			require.NoError(c, c.cache.Reload(c.options()))
			storing, err := c.cache.reserve(context.Background(), stranger, false, 1<<20+1)
			require.NoError(c, err)
			c.Cleanup(storing.release)
			next := c.options()
			next.Space = SpaceOptions{UserBytes: Amount{Bytes: 1 << 20}}
			require.NoError(c, c.cache.Reload(next))
			return "and uid 4242 has 1.0 MiB of at most 1.0 MiB"
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCrowded(t)
			says := change(c)
			queued, _ := c.cache.places.anyQueued()
			_, err := c.cache.Put(context.Background(), Peer{UID: stranger}, c.claimed.put, nil)
			require.ErrorContains(t, err, says)
			require.Equal(t, refusal.NoSpace, refusal.ClassOf(err))
			now, _ := c.cache.places.anyQueued()
			require.Equal(t, queued, now)
			require.NoError(t, c.cache.GiveUp(context.Background(), Peer{UID: stranger}, c.claimed.claim.ID, "", 0), "the claim is still held")
		})
	}
}

// What comes to nothing after all ends the claim with a word, and who waited for it may compile.
func TestWhatWasQueuedInVain(t *testing.T) {
	for name, of := range map[string]struct {
		before func(c *crowded)
		after  func(c *crowded, a *Answer)
		says   string
		unkept uint64
	}{
		"its file is written": {nil, func(c *crowded, _ *Answer) {
			path := c.claimed.put.Files[1].File.Name()
			require.NoError(c, os.WriteFile(path, c.claimed.bytes(1), 0o644))
			require.NoError(c, os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour))) // clocks of file systems are coarse
			c.makeRoom()
		}, "changed while it waited for room", 0},
		"its file grows": {nil, func(c *crowded, _ *Answer) {
			path := c.claimed.put.Files[1].File.Name()
			info, err := os.Stat(path)
			require.NoError(c, err)
			require.NoError(c, os.Truncate(path, info.Size()+1))
			require.NoError(c, os.Chtimes(path, time.Time{}, info.ModTime()))
			c.makeRoom()
		}, "changed while it waited for room", 0},
		"it is no artefact": {func(c *crowded) { c.claimed.put.Files = c.claimed.put.Files[:1] }, func(c *crowded, _ *Answer) { c.makeRoom() }, "is not its artefact", 0},
		"there is no room": {func(c *crowded) { c.cache.places.lasts = 100 * time.Millisecond }, func(*crowded, *Answer) {},
			"what was put is not kept: there was no room within 100ms: model ", 1},
		"given up": {nil, func(c *crowded, _ *Answer) {
			require.NoError(c, c.cache.GiveUp(context.Background(), Peer{UID: stranger}, c.claimed.claim.ID, "not worth it", 0))
		}, "not worth it", 0},
		"cancelled": {nil, func(c *crowded, a *Answer) {
			_, err := c.cache.CancelJobs(context.Background(), Peer{UID: stranger}, []string{a.Job}, false)
			require.NoError(c, err)
		}, jobCancelled, 0},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCrowded(t)
			if of.before != nil {
				of.before(c)
			}
			a := c.queue()
			of.after(c, a)
			require.NotEqual(t, JobDone, c.follow(stranger, a.Job).State)
			c.noneQueued()
			require.Equal(t, of.unkept, c.cache.index.Counters()["unkept"])
			events := c.events(c.self())
			ended := events[len(events)-1]
			for i := range events {
				if events[i].Kind == EventClaimEnded {
					ended = events[i]
				}
			}
			require.Equal(t, EventClaimEnded, ended.Kind)
			require.Contains(t, ended.Text, of.says)
			r := c.claimed.ask(c.model(1))
			r.Connection = context.Background()
			require.Equal(t, Claimed, c.acquire(r).Outcome)
		})
	}
}

// askerMayCompile has somebody ask for what is queued, and requires that the model is left to that one, and the queue is empty.
func (c *crowded) askerMayCompile() {
	c.Helper()
	r := c.claimed.ask(c.model(1))
	r.Connection = context.Background()
	got := <-c.asked(r)
	require.NoError(c, got.err)
	require.Equal(c, Claimed, got.answer.Outcome)
	require.Contains(c, got.answer.Why, "nothing more may go")
	c.noneQueued()
}

// A request that waits for what can have no room is not kept waiting for long: it may compile.
func TestWhoWaitsForWhatHasNoRoomMayCompile(t *testing.T) {
	c := newCrowded(t)
	c.queue()
	c.askerMayCompile()
}

// Nor is who waits for one that waits for its turn behind such ones.
func TestWhoWaitsForWhatHasNoTurnMayCompile(t *testing.T) {
	c := newCrowded(t)
	c.cache.places.lasts = time.Hour
	c.cache.places.first <- struct{}{} // another one's turn, which does not end
	c.queue()
	c.cache.places.want() // as that one would
	c.askerMayCompile()
}

// What has room and waits for another put of its user is in nobody's way, but has its descriptors open: they count.
func TestWhatHasRoomCountsUntilItsFilesAreRead(t *testing.T) {
	for name, lasts := range map[string]time.Duration{"kept": time.Hour, "given up": time.Second} {
		t.Run(name, func(t *testing.T) {
			c := newCrowded(t)
			c.cache.places.lasts = lasts
			a := c.queue()
			leave, err := c.cache.claims.puts.enter(context.Background(), c.cache.reports.owners.of(stranger), nil)
			require.NoError(t, err)
			c.makeRoom()
			if lasts > time.Minute {
				require.Eventually(t, func() bool { n, _ := c.cache.places.anyQueued(); return n == 0 }, time.Minute, time.Millisecond)
				require.Equal(t, queuedSum{1, 2, 4 * cas.Block}, c.openQueued())
				leave()
				require.Equal(t, JobDone, c.follow(stranger, a.Job).State)
			} else {
				require.NotEqual(t, JobDone, c.follow(stranger, a.Job).State, "it does not wait for ever")
				leave()
			}
			c.noneQueued()
			require.Eventually(t, func() bool {
				space, err := c.cache.Space()
				return err == nil && space.Reserved == 0
			}, time.Minute, time.Millisecond)
		})
	}
}

// Of a build that goes as soon as it is kept it is not said that it was not.
func TestWhatWasKeptAndIsGoneIsNotCalledUnkept(t *testing.T) {
	b := newBench(t)
	claimed := newClaimed(b, nil)
	cl, err := b.cache.claims.find(Peer{UID: stranger}, claimed.claim.ID)
	require.NoError(t, err)
	build := &index.Build{ID: index.BuildID{1}}
	b.cache.attend.mu.Lock()
	b.cache.attend.going[build.ID] = true
	b.cache.attend.mu.Unlock()
	b.cache.deliverQueued(cl, &compiled{build: build})
	require.Equal(t, "what was put was kept, and cannot be served: "+errGone.Error(), cl.overWhy())
}

// While nothing may go, what waits for room does not keep the collector busy.
func TestWhatIsQueuedLetsTheCollectorRest(t *testing.T) {
	c := newCrowded(t)
	c.queue()
	rounds := func() uint64 {
		c.cache.places.mu.Lock()
		defer c.cache.places.mu.Unlock()
		return c.cache.places.begun
	}
	began, before := time.Now(), rounds()
	time.Sleep(time.Second)     // a longer time has more rounds
	looked := rounds() - before // none, perhaps, on a busy machine
	require.LessOrEqual(t, float64(looked), 30+10*time.Since(began).Seconds())
	c.makeRoom()
	c.noneQueued()
}

// A daemon that stops keeps nothing that waits, and leaves nothing of it.
func TestWhatIsQueuedEndsWithTheDaemon(t *testing.T) {
	c := newCrowded(t)
	c.cache.places.first <- struct{}{} // its turn does not come
	c.queue()
	c.makeRoom()
	c.reopen()
	for _, l := range c.list() {
		require.False(t, l.Build.Put)
	}
	require.Empty(t, c.staged())
	r := c.claimed.ask(c.model(1))
	r.Connection = context.Background()
	require.Equal(t, Claimed, c.acquire(r).Outcome)
}

// What may be queued as well does not get in before what is queued; what is compiled, for which somebody waits, does.
func TestNobodyOvertakesTheQueue(t *testing.T) {
	b := newBenchWith(t, withSpace(SpaceOptions{Budget: Amount{Bytes: 1 << 20}}))
	ctx := context.Background()
	q, ok := b.cache.queue(1, 1<<10, 0, 0, nil)
	require.True(t, ok)
	late := &reservation{c: b.cache, queues: true}
	require.ErrorContains(t, late.resize(ctx, false, 1), "1 results of 1.0 KiB that came before wait for room as well")
	now := &reservation{c: b.cache}
	require.NoError(t, now.resize(ctx, false, 1))
	q.leave()
	q.leave()
	require.NoError(t, late.resize(ctx, false, 1))
	now.release()
	late.release()
}

// A user has a part of the queue, or one put of any size, and others may be queued all the same. What is not queued is taken if there is room.
func TestAUserHasAPartOfTheQueue(t *testing.T) {
	const budget = 8 << 20
	b := newBenchWith(t, withSpace(SpaceOptions{Budget: Amount{Bytes: budget}}))
	one, ok := b.cache.queue(1, budget, 0, maxQueuedFiles/2, nil)
	require.True(t, ok)
	_, ok = b.cache.queue(1, 1, 0, 0, nil)
	require.False(t, ok, "more bytes than its part")
	one.leave()
	first, ok := b.cache.queue(1, 1, 0, maxQueuedFiles/queuedUserPart, nil)
	require.True(t, ok)
	_, ok = b.cache.queue(1, 1, 0, 1, nil)
	require.False(t, ok, "more files")
	first.leave()

	b.fillOf(stranger)
	_, ok = b.cache.queue(b.cache.reports.owners.of(stranger), 1, 0, 0, nil)
	require.False(t, ok, "more puts")
	_, ok = b.cache.queue(1, 1, 0, 0, nil)
	require.True(t, ok, "another user's")
	cl := newClaimed(b, nil)
	cl.put.Later = true
	a, err := b.cache.Put(context.Background(), Peer{UID: stranger}, cl.put, nil)
	require.NoError(t, err)
	require.Equal(t, Taken, a.Outcome)
}

// What only its user's quota has no room for is not queued where others wait, and nobody else's builds go for it.
func TestAQuotaIsNothingToQueueFor(t *testing.T) {
	s := newPlaces()
	s.queued[&queued{disk: 1}] = true
	now := &roomNow{bounds: bounds{user: 1000}, users: map[uint32]index.UserSpace{1: {LogicalBytes: 1001}}}
	full, other := &reservation{user: 1, queues: true}, &reservation{user: 2, queues: true}
	_, err := s.admit(now, full, 8192, 10, time.Now())
	require.ErrorContains(t, err, "and uid 1 has")
	require.False(t, fitsLater(err))
	bytes, _ := full.lacks(8192, err)
	require.Zero(t, bytes)
	_, err = s.admit(now, other, 8192, 10, time.Now())
	require.ErrorContains(t, err, "came before wait for room")
	require.True(t, fitsLater(err))
	bytes, _ = other.lacks(8192, err)
	require.Equal(t, int64(8192), bytes)
}

// What was answered is waited for by nobody: so much goes for it at a time that the rest may still be hits.
func TestWhatIsQueuedHasRoomMadeBitByBit(t *testing.T) {
	b := newBench(t)
	s := b.cache.places
	s.queued = map[*queued]bool{{disk: 100}: true, {disk: 100}: true, {disk: 300}: true}
	for budget, want := range map[int64]int64{0: 300, 800: 300, 3200: 400, 1 << 20: 500} {
		bytes, _, any := s.waitedFor(budget)
		require.Equal(t, want, bytes)
		require.True(t, any)
	}
	require.True(t, s.hurry())
	clear(s.queued)
}
