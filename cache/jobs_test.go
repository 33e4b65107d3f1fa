package cache

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// jobbing is a bench with compiles that wait at a gate, and so many slots.
func jobbing(t testing.TB, slots int) (*bench, *gate) {
	g := &gate{pass: make(chan struct{}), hold: true}
	b := newBenchWith(t, func(o *Options) {
		g.Compiler, o.Compiler, o.Jobs = o.Compiler, g, slots
	})
	return b, g
}

// got is what a request on a goroutine of its own came to.
type got struct {
	answer *request.Answer
	err    error
}

// ask asks on a goroutine of its own.
func (b *bench) ask(ctx context.Context, r *request.Request) <-chan got {
	out := make(chan got, 1)
	go func() {
		a, err := b.cache.Acquire(ctx, r, nil)
		out <- got{a, err}
	}()
	return out
}

// served requires an answer with a view.
func (b *bench) served(c <-chan got) *request.Answer {
	b.Helper()
	one := <-c
	require.NoError(b, one.err)
	require.NotNil(b, one.answer.View)
	b.Cleanup(func() { one.answer.View.Close() })
	return one.answer
}

// queued waits until so many jobs stand in the queue: they enter it on goroutines of their own.
func (b *bench) queued(n int) {
	b.Helper()
	require.Eventually(b, func() bool {
		waiting := 0
		for _, i := range b.cache.jobs.InOrder(func(*jobs.Job) bool { return true }) {
			if i.State == jobs.Queued && i.Phase == "queued" {
				waiting++
			}
		}
		return waiting == n
	}, soon, time.Millisecond)
}

// later1 asks for the model in the background.
func (b *bench) later1(seed uint64, uid uint32) *request.Answer {
	b.Helper()
	a, err := b.cache.Acquire(context.Background(), b.laterRequest(seed, uid), nil)
	require.NoError(b, err)
	require.Nil(b, a.View)
	require.Equal(b, request.Later, a.Outcome)
	return a
}

func (b *bench) laterRequest(seed uint64, uid uint32) *request.Request {
	r := b.request(b.model(seed))
	r.Peer, r.OnMiss = request.Peer{UID: uid}, request.Background
	return r
}

func (b *bench) jobs(uid uint32) []jobs.Info {
	b.Helper()
	listed, err := b.cache.JobList.Visible(context.Background(), request.Peer{UID: uid})
	require.NoError(b, err)
	return listed
}

// follow waits for the end of a job.
func (b *bench) follow(uid uint32, id string) jobs.Info {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	j, err := b.cache.JobList.Follow(ctx, request.Peer{UID: uid}, id, nil)
	require.NoError(b, err)
	return j
}

// begins waits until so many compiles have begun.
func (b *bench) begins(g *gate, n int) {
	b.Helper()
	require.Eventually(b, func() bool { return len(g.begun()) == n }, soon, time.Millisecond)
}

const somebody, somebodyElse = 4001, 4002

func TestBackgroundAnswersAtOnceAndCompiles(t *testing.T) {
	b, g := jobbing(t, 1)
	a := b.later1(1, somebody)
	require.NotEmpty(t, a.Job)
	require.NotZero(t, a.RequestKey)
	b.begins(g, 1)
	listed := b.jobs(somebody)
	require.Len(t, listed, 1)
	require.Equal(t, a.Job, listed[0].ID)
	require.Equal(t, jobs.Running, listed[0].State)
	require.Equal(t, "model.onnx", listed[0].ModelName)
	require.Equal(t, standin.EP, listed[0].EP)
	require.EqualValues(t, somebody, listed[0].UID)
	require.True(t, listed[0].Background)
	require.Zero(t, listed[0].Waiting)
	require.Equal(t, a.Job, b.later1(1, somebody).Job, "one job, however often it is asked for")
	impatient := b.laterRequest(1, somebody)
	impatient.OnMiss = request.Fail
	e := b.refused(impatient)
	require.Equal(t, apierr.NotFound, e.Class)
	require.Regexp(t,
		`^no build yet for model "model.onnx": it is being compiled \((reading|compiling), `+
			`for 0s\)$`, e.Text)
	require.Equal(t, a.Job, e.Facts["job"])
	require.Contains(t, e.Hint, "wait for it: request it with on_miss wait, or epcachectl jobs "+
		"follow "+
		a.Job)
	// a user that has not asked for the job may wait for it, but not follow it
	impatient = b.laterRequest(1, somebodyElse)
	impatient.OnMiss = request.Fail
	e = b.refused(impatient)
	require.Contains(t, e.Text, "it is being compiled")
	require.Empty(t, e.Facts["job"])
	require.Equal(t, "wait for it: request it with on_miss wait", e.Hint)
	close(g.pass)
	done := b.follow(somebody, a.Job)
	require.Equal(t, jobs.Done, done.State)
	r := b.laterRequest(1, somebody)
	hit, err := b.cache.Acquire(context.Background(), r, nil)
	require.NoError(t, err)
	defer hit.View.Close()
	require.Equal(t, request.Hit, hit.Outcome)
	require.EqualValues(t, 1, b.compiler.Idle.Load(), "at the lowest priority")
	require.Empty(t, b.jobs(somebody))
	require.Equal(t, jobs.Done, b.follow(somebody, a.Job).State,
		"that of a job that ended is sent at once")
}

func TestWaitingJobsGoBeforeBackgroundJobs(t *testing.T) {
	b, g := jobbing(t, 1)
	first := b.ask(context.Background(), b.request(b.model(1)))
	b.begins(g, 1)
	b.later1(2, somebody)
	behind := b.later1(3, somebody)
	b.queued(2)
	waiting := b.ask(context.Background(), b.request(b.model(4)))
	b.queued(3)
	joined := b.ask(context.Background(), b.request(b.model(3)))
	require.Eventually(t, func() bool { return b.waiters() == 3 }, soon, time.Millisecond)
	var order []string
	for _, j := range b.jobs(0) {
		order = append(order, j.Build.String()[:8])
	}
	keys := b.jobs(0)
	require.Equal(t, behind.Job, keys[1].ID,
		"a request that waits moves it up, and it came before the other")
	require.False(t, keys[1].Background)
	close(g.pass)
	b.served(first)
	b.served(waiting)
	b.served(joined)
	for _, j := range keys {
		b.follow(0, j.ID)
	}
	var ran []string
	for _, name := range g.begun() {
		ran = append(ran, name[:8])
	}
	require.Equal(t, order, ran)
}

func TestBackgroundJobTakesNoSlotFromRequests(t *testing.T) {
	b, g := jobbing(t, 1)
	a := b.later1(1, somebody)
	b.begins(g, 1)
	waiting := b.ask(context.Background(), b.request(b.model(2)))
	b.begins(g, 2)
	close(g.pass)
	b.served(waiting)
	require.Equal(t, jobs.Done, b.follow(somebody, a.Job).State)
}

func TestKeepGoingJobOutlivesItsRequest(t *testing.T) {
	b, g := jobbing(t, 1)
	ctx, cancel := context.WithCancel(context.Background())
	r := b.request(b.model(1))
	r.KeepGoing = true
	asked := b.ask(ctx, r)
	b.begins(g, 1)
	job := b.jobs(0)[0]
	require.Equal(t, 1, job.Waiting)
	cancel()
	require.Equal(t, apierr.Cancelled, apierr.ClassOf((<-asked).err))
	require.True(t, b.jobs(0)[0].Background)
	close(g.pass)
	require.Equal(t, jobs.Done, b.follow(0, job.ID).State)
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
}

func TestUsersSeeTheirOwnJobs(t *testing.T) {
	b, g := jobbing(t, 1)
	a := b.later1(1, somebody)
	b.begins(g, 1)
	require.Len(t, b.jobs(0), 1)
	require.Empty(t, b.jobs(somebodyElse))
	_, err := b.cache.JobList.Follow(context.Background(), request.Peer{UID: somebodyElse}, a.Job,
		nil)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	_, err = b.cache.JobList.Cancel(context.Background(), request.Peer{UID: somebodyElse},
		[]string{a.Job}, false)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	// a user that has the model may see that it is compiled, but not which user asked
	b.later1(1, somebodyElse)
	require.EqualValues(t, somebodyElse, b.jobs(somebodyElse)[0].UID)
	require.EqualValues(t, somebody, b.jobs(0)[0].UID)
	close(g.pass)
	b.follow(somebodyElse, a.Job)
}

func TestCancelEndsOnesOwnPart(t *testing.T) {
	b, g := jobbing(t, 1)
	r := b.request(b.model(1))
	r.Peer.UID = somebody
	mine := b.ask(context.Background(), r)
	b.begins(g, 1)
	other := b.request(b.model(1))
	other.Peer.UID = somebodyElse
	theirs := b.ask(context.Background(), other)
	require.Eventually(t, func() bool { return b.waiters() == 2 }, soon, time.Millisecond)
	listed, err := b.cache.JobList.Cancel(context.Background(), request.Peer{UID: somebody}, nil,
		true)
	require.NoError(t, err)
	require.Len(t, listed, 1)
	require.Equal(t, jobs.Running, listed[0].State, "somebody else waits for it")
	one := <-mine
	require.Equal(t, apierr.Cancelled, apierr.ClassOf(one.err))
	close(g.pass)
	b.served(theirs)
	require.Len(t, g.begun(), 1)
}

func TestCancelByAnAdministratorEndsTheJob(t *testing.T) {
	b, g := jobbing(t, 1)
	r := b.request(b.model(1))
	r.Peer.UID = somebody
	asked := b.ask(context.Background(), r)
	b.begins(g, 1)
	job := b.later1(1, somebodyElse).Job
	listed, err := b.cache.JobList.Cancel(context.Background(), request.Peer{}, []string{job},
		false)
	require.NoError(t, err)
	require.Equal(t, jobs.Cancelled, listed[0].State)
	require.Equal(t, apierr.Cancelled, apierr.ClassOf((<-asked).err))
	require.Equal(t, jobs.Cancelled, b.follow(somebodyElse, job).State)
	require.Empty(t, b.jobs(0))
	require.Equal(t, []string{event.Cancelled}, b.kinds(listed[0].RequestKey),
		"whoever does not wait hears of it")
}

func TestCancelRefusals(t *testing.T) {
	b := newBench(t)
	for name, test := range map[string]struct {
		ids  []string
		all  bool
		want apierr.Class
	}{
		"neither":        {want: apierr.BadRequest},
		"both":           {ids: []string{"x"}, all: true, want: apierr.BadRequest},
		"no such job":    {ids: []string{"0123"}, want: apierr.NotFound},
		"an empty name":  {ids: []string{""}, want: apierr.NotFound},
		"all of nothing": {all: true},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := b.cache.JobList.Cancel(context.Background(), request.Peer{UID: somebody},
				test.ids, test.all)
			if test.want == 0 {
				require.NoError(t, err)
				return
			}
			require.Equal(t, test.want, apierr.ClassOf(err))
		})
	}
}

func TestBackgroundIsBoundedForEachUser(t *testing.T) {
	b, g := jobbing(t, 1)
	for seed := range uint64(jobs.MaxKept) {
		b.later1(seed, somebody)
	}
	_, err := b.cache.Acquire(context.Background(), b.laterRequest(jobs.MaxKept, somebody), nil)
	require.Equal(t, apierr.Busy, apierr.ClassOf(err))
	b.later1(0, somebody)
	b.later1(jobs.MaxKept, somebodyElse)
	listed, err := b.cache.JobList.Cancel(context.Background(), request.Peer{UID: somebody}, nil,
		true)
	require.NoError(t, err)
	require.Len(t, listed, jobs.MaxKept)
	b.later1(jobs.MaxKept+1, somebody)
	require.Len(t, b.jobs(0), 2)
	close(g.pass)
}

func TestBackgroundKeepsSomething(t *testing.T) {
	b := newBench(t)
	r := b.laterRequest(1, somebody)
	r.Store = "none"
	require.Equal(t, apierr.BadRequest, b.refused(r).Class)
}

func TestAJobThatFailsTellsWhy(t *testing.T) {
	b, g := jobbing(t, 1)
	b.compiler.Fault = standin.Refuse
	a := b.later1(1, somebody)
	close(g.pass)
	j := b.follow(somebody, a.Job)
	require.Equal(t, jobs.Failed, j.State)
	require.Equal(t, apierr.CompileFailed, apierr.ClassOf(j.Err))
	require.NotEqual(t, index.RequestKey{}, j.RequestKey)
}

func TestABackgroundJobMakesRoomAndBeginsAgain(t *testing.T) {
	g := &gate{pass: make(chan struct{}), hold: true}
	b := newBenchWith(t, func(o *Options) {
		g.Compiler, o.Compiler, o.Jobs, o.JobsMemory = o.Compiler, g, 2, 300<<20
	})
	a := b.later1(1, somebody)
	b.begins(g, 1)
	waiting := b.ask(context.Background(), b.request(b.model(2)))
	b.begins(g, 2)
	require.Eventually(t, func() bool { return b.jobs(somebody)[0].State == jobs.Queued }, soon,
		time.Millisecond)
	require.NotEqual(t, g.begun()[0], g.begun()[1])
	g.pass <- struct{}{}
	b.served(waiting)
	b.begins(g, 3)
	require.Equal(t, g.begun()[0], g.begun()[2])
	g.pass <- struct{}{}
	require.Equal(t, jobs.Done, b.follow(somebody, a.Job).State)
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
}

// heard records progress, in order.
type heard struct {
	mu      sync.Mutex
	reports []request.Progress
}

func (h *heard) record(p request.Progress) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reports = append(h.reports, p)
}

func (h *heard) phases() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []string
	for _, p := range h.reports {
		out = append(out, p.Phase)
	}
	return slices.Compact(out)
}

func TestFollowTellsThePhasesAndTheEnd(t *testing.T) {
	b, g := jobbing(t, 1)
	a := b.later1(1, somebody)
	b.begins(g, 1)
	var h heard
	followed := make(chan jobs.Info, 1)
	go func() {
		j, err := b.cache.JobList.Follow(context.Background(), request.Peer{UID: somebody}, a.Job,
			h.record)
		if err == nil {
			followed <- j
		}
		close(followed)
	}()
	// A follower that comes early hears of what precedes the compile, too.
	require.Eventually(t, func() bool { return slices.Contains(h.phases(), "compiling") }, soon,
		time.Millisecond)
	close(g.pass)
	require.Equal(t, jobs.Done, (<-followed).State)
	phases := h.phases()
	require.Equal(t, []string{"compiling", "checking", "storing"},
		phases[slices.Index(phases, "compiling"):])
	require.Equal(t, a.Job, h.reports[0].Job)
}

func TestFollowingKeepsNoJobAlive(t *testing.T) {
	b, g := jobbing(t, 1)
	ctx, cancel := context.WithCancel(context.Background())
	asked := b.ask(ctx, b.request(b.model(1)))
	b.begins(g, 1)
	followed := make(chan jobs.Info, 1)
	id := b.jobs(0)[0].ID
	go func() {
		j, err := b.cache.JobList.Follow(context.Background(), request.Peer{}, id, nil)
		if err == nil {
			followed <- j
		}
		close(followed)
	}()
	require.Eventually(t, func() bool { return b.followers() == 1 }, soon, time.Millisecond)
	cancel()
	require.Equal(t, apierr.Cancelled, apierr.ClassOf((<-asked).err))
	require.Equal(t, jobs.Cancelled, (<-followed).State)
	require.Zero(t, b.cache.jobs.Count())
}

// followers counts the callers that only follow a job.
func (b *bench) followers() int {
	n := 0
	for _, f := range b.cache.jobs.List() {
		_, following := f.CountWatchers()
		n += following
	}
	return n
}

func TestWaitersHearOfTheJobAndHowLongItMayTake(t *testing.T) {
	b, g := jobbing(t, 1)
	b.cache.jobs.Costs.Learn(b.factsOf(1).Kind(), time.Hour, 0, 0, false)
	var h heard
	r := b.request(b.model(1))
	done := make(chan got, 1)
	go func() {
		a, err := b.cache.Acquire(context.Background(), r, h.record)
		done <- got{a, err}
	}()
	b.begins(g, 1)
	job := b.jobs(0)[0]
	require.Equal(t, time.Hour, job.Estimate.Round(time.Minute))
	close(g.pass)
	b.served(done)
	require.Equal(t, []string{"queued", "reading", "compiling", "checking", "storing"},
		h.phases()[slices.Index(h.phases(), "queued"):][:5])
	last := h.reports[len(h.reports)-1]
	for _, p := range h.reports {
		if p.Job != "" {
			last = p
		}
	}
	require.Equal(t, job.ID, last.Job)
	require.Equal(t, 1, last.Waiting)
	require.Equal(t, time.Hour, last.Estimate.Round(time.Minute))
}

func (b *bench) factsOf(seed uint64) *jobs.Description {
	info, err := b.model(seed).Stat()
	require.NoError(b, err)
	return &jobs.Description{EPs: []string{standin.EP}, Size: info.Size()}
}

func TestPastJobsAreForgotten(t *testing.T) {
	b, g := jobbing(t, 1)
	close(g.pass)
	a := b.later1(1, somebody)
	require.Equal(t, jobs.Done, b.follow(somebody, a.Job).State)
	b.later.Add(int64(jobs.EndedFor + time.Second))
	_, err := b.cache.JobList.Follow(context.Background(), request.Peer{UID: somebody}, a.Job, nil)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
}

func TestBackgroundOutlivesAClaimThatBringsNothing(t *testing.T) {
	b, g := jobbing(t, 1)
	r := b.request(b.model(1))
	r.OnMiss = request.ForClaim
	claimed := b.acquire(r)
	require.Equal(t, request.Claimed, claimed.Outcome)
	for range 3 {
		a := b.later1(1, somebody)
		require.Equal(t, b.jobs(somebody)[0].ID, a.Job)
		require.Equal(t, jobs.Claimed, b.jobs(somebody)[0].State)
	}
	require.NoError(t, b.cache.Claims.GiveUp(r.Peer, claimed.Claim.ID, "it crashed", 0))
	b.begins(g, 1)
	listed := b.jobs(somebody)
	require.Len(t, listed, 1)
	require.Equal(t, jobs.Running, listed[0].State)
	close(g.pass)
	require.Equal(t, jobs.Done, b.follow(somebody, listed[0].ID).State)
	require.Len(t, g.begun(), 1)
}
