package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// full is a store that is above its budget with builds that are all in use.
type full struct {
	*bench
	inUse []*Answer
}

func newFull(t *testing.T, change func(*Options)) *full {
	b := newBenchWith(t, change)
	f := &full{bench: b, inUse: []*Answer{b.acquire(b.held(100)), b.acquire(b.held(101))}}
	b.compiler.Compiles.Store(0)
	next, now := b.options(), b.account()
	next.Space = SpaceOptions{Budget: Amount{Bytes: now.counted() - 1}}
	require.NoError(t, b.cache.Reload(next))
	return f
}

// answered compiles a model that has no room now, and requires that it is to be kept.
func (f *full) answered(r *Request) *Answer {
	f.Helper()
	a := f.acquire(r)
	require.Equal(f, Compiled, a.Outcome)
	require.True(f, a.Unkept)
	require.Len(f, a.Warnings, 1)
	require.Contains(f, a.Warnings[0], "not kept yet: it takes ")
	require.Contains(f, a.Warnings[0], "of the budget of")
	return a
}

func (f *full) makeRoom() {
	f.Helper()
	for _, a := range f.inUse {
		require.NoError(f, a.View.Close())
	}
}

// settled waits until nothing waits to be kept.
func (f *full) settled() {
	f.Helper()
	require.Eventually(f, func() bool {
		s := f.cache.places
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.opened) == 0
	}, time.Minute, time.Millisecond)
	require.Eventually(f, func() bool { return f.cache.flights.count() == 0 }, time.Minute, time.Millisecond)
	space, err := f.cache.Space()
	require.NoError(f, err)
	require.Zero(f, space.Reserved)
}

// What the daemon compiled while there was no room is answered, and kept when there is some: nobody compiles it again, neither
// meanwhile nor later, and no byte of it is written twice.
func TestWhatIsCompiledWithoutRoomIsKeptLater(t *testing.T) {
	f := newFull(t, nil)
	before := f.account()
	a := f.answered(f.held(1))
	require.Equal(t, before, f.account())
	space, err := f.cache.Space()
	require.NoError(t, err)
	require.Equal(t, 1, space.Queued)
	require.Equal(t, int64(4*cas.Block), space.QueuedBytes)
	var jobs []Job
	require.Eventually(t, func() bool { // its job begins beside the answer
		jobs = f.jobs(f.cache.uid)
		return len(jobs) == 1 && jobs[0].Phase != ""
	}, soon, time.Millisecond)
	require.Equal(t, []string{JobQueued, phaseNoRoom, "compiled and answered; to be kept as soon as there is room"}, []string{jobs[0].State, jobs[0].Phase, jobs[0].Why})
	require.Contains(t, f.explain(f.held(1)).Reason, "and not kept yet, though whoever asks is given it: it is kept as soon as there is room: it takes")

	for _, how := range []OnMiss{Wait, Fail} {
		r := f.held(1)
		r.OnMiss = how
		again := f.acquire(r)
		require.Equal(t, Waited, again.Outcome)
		require.Equal(t, a.Path, again.Path, "the same view")
		require.Contains(t, again.Why, "not kept yet: ")
		require.NoError(t, again.View.Close())
	}
	require.EqualValues(t, 1, f.compiler.Compiles.Load())

	f.makeRoom()
	require.Equal(t, JobDone, f.follow(f.cache.uid, jobs[0].ID).State)
	f.settled()
	require.Equal(t, []string{EventUnkeptYet, EventCompiled}, f.kinds(a.RequestKey))
	hit := f.acquire(f.held(1))
	require.Equal(t, Hit, hit.Outcome)
	require.False(t, hit.Unkept)
	require.NotEqual(t, filepath.Dir(a.Graph), filepath.Dir(hit.Graph), "a view of its own")
	require.Equal(t, f.read(a), f.read(hit))
	require.Empty(t, hit.Warnings)
	require.EqualValues(t, 1, f.compiler.Compiles.Load())
	require.Zero(t, f.cache.index.Counters()["unkept"])
	served, err := os.Stat(filepath.Join(a.Path, a.Graph))
	require.NoError(t, err)
	stored, err := os.Stat(filepath.Join(hit.Path, hit.Graph))
	require.NoError(t, err)
	require.True(t, os.SameFile(served, stored))

	require.Equal(t, keptInUse, f.cache.wantedNow(hit.Build.ID), "its going would free nothing")
	require.NoError(t, a.View.Close())
	f.later.Store(int64(time.Hour))
	require.Eventually(t, func() bool { // the daemon itself may just be reading what it stored
		f.cache.views.Sweep()
		_, err := os.Stat(a.Path)
		return os.IsNotExist(err)
	}, time.Minute, time.Millisecond)
	require.Empty(t, f.cache.wantedNow(hit.Build.ID))
	for _, file := range hit.Build.Files {
		_, ok := f.cache.cas.Stamp(file.Digest)
		require.True(t, ok)
	}
	v, err := f.cache.viewOf(context.Background(), hit.Build, func(phase string) {
		require.NotEqual(t, "verifying", phase, "hashed again after the store's own unlinking")
	})
	require.NoError(t, err)
	require.Same(t, v, f.cache.views.Sound(hit.Build.ID))
}

// What comes to nothing after all is said to, once, and the next request compiles.
func TestWhatIsNotKeptAfterAll(t *testing.T) {
	for name, of := range map[string]struct {
		before, after func(f *full, a *Answer)
		says          string
	}{
		"there is no room": {func(f *full, _ *Answer) { f.cache.places.lasts = 50 * time.Millisecond }, func(*full, *Answer) {}, "there was no room within 50ms: it takes"},
		"cancelled": {nil, func(f *full, _ *Answer) {
			_, err := f.cache.CancelJobs(context.Background(), f.self(), []string{f.jobs(f.cache.uid)[0].ID}, false)
			require.NoError(f, err)
		}, "there was no room before its job was cancelled"},
		"it was written meanwhile": {nil, func(f *full, a *Answer) {
			path := filepath.Join(a.Path, a.Graph)
			require.NoError(f, os.Chmod(path, 0o600))
			data, err := os.ReadFile(path)
			require.NoError(f, err)
			data[len(data)/2] ^= 1
			require.NoError(f, os.WriteFile(path, data, 0o600))
			f.makeRoom()
		}, "changed"},
		"it was removed meanwhile": {nil, func(f *full, a *Answer) {
			require.NoError(f, os.Chmod(filepath.Dir(filepath.Join(a.Path, a.Graph)), 0o700))
			require.NoError(f, os.Remove(filepath.Join(a.Path, a.Graph)))
			f.makeRoom()
		}, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFull(t, nil)
			if of.before != nil {
				of.before(f, nil)
			}
			a := f.answered(f.held(1))
			of.after(f, a)
			f.settled()
			events, err := f.cache.index.History(a.RequestKey)
			require.NoError(t, err)
			require.Equal(t, []string{EventUnkeptYet, EventUnkept}, f.kinds(a.RequestKey))
			require.Contains(t, events[len(events)-1].Text, of.says)
			require.Contains(t, f.cache.whyNone(f.self(), a.RequestKey), "and not kept: ")
			require.Equal(t, Compiled, f.acquire(f.held(1)).Outcome)
			require.EqualValues(t, 2, f.compiler.Compiles.Load())
		})
	}
}

// Somebody who removes or writes the view while it waits has the next request compiled, and not given that.
func TestWhatWaitsIsGivenOnlyAsItWas(t *testing.T) {
	f := newFull(t, nil)
	a := f.answered(f.held(1))
	require.NoError(t, os.Chmod(filepath.Join(a.Path, a.Graph), 0o600))
	require.NoError(t, os.Truncate(filepath.Join(a.Path, a.Graph), 1))
	again := f.acquire(f.held(1))
	require.Equal(t, Compiled, again.Outcome)
	require.NotEqual(t, a.Path, again.Path)
	require.NotEqual(t, f.read(a), f.read(again))
}

// A daemon that stops keeps nothing that waits, and says so; one that dies leaves nothing of it, and why does.
func TestWhatWaitsEndsWithTheDaemon(t *testing.T) {
	f := newFull(t, nil)
	a := f.answered(f.held(1))
	f.reopen()
	require.Equal(t, []string{EventUnkeptYet, EventUnkept}, f.kinds(a.RequestKey))
	require.Contains(t, f.explain(f.held(1)).Reason, "and not kept: there was no room before the daemon stopped")
	require.Len(t, f.list(), 2)

	f.cache.happened(eventUnkept(a.Build, EventUnkeptYet, "it is kept as soon as there is room")) // the last word of one that died
	require.Contains(t, f.explain(f.held(1)).Reason, "and not kept: the daemon ended before there was room")
	why, err := f.cache.Why(context.Background(), f.self(), a.RequestKey.String())
	require.NoError(t, err)
	require.Contains(t, why.Reason, "the daemon ended before there was room")
}

// Copies of the source models are kept with it, if they are still what was compiled.
func TestTheModelIsKeptLaterAsWell(t *testing.T) {
	for name, changes := range map[string]bool{"as it was": false, "changed": true} {
		t.Run(name, func(t *testing.T) {
			f := newFull(t, func(o *Options) { o.KeepSource = KeepCopy })
			model := f.model(1)
			r := f.request(model)
			r.HoldsView = true
			f.answered(r)
			if changes {
				require.NoError(t, os.Chtimes(model.Name(), time.Time{}, time.Now().Add(time.Hour)))
			}
			f.makeRoom()
			f.settled()
			var b *index.Build
			for _, l := range f.list() {
				if l.Build.UID == f.cache.uid && l.Build.ModelName == filepath.Base(model.Name()) && l.Build.Created.After(f.inUse[1].Build.Created) {
					b = &l.Build
				}
			}
			require.NotNil(t, b)
			require.Equal(t, !changes, b.Source.Kind == index.SourceCopy)
			if !changes {
				again, err := f.cache.sourceRequest(context.Background(), b)
				require.NoError(t, err)
				again.close()
			}
		})
	}
}

// What is too large for the whole budget, or has no place in the queue, is served and not kept, as it was before there was a queue.
func TestWhatIsCompiledAndNotQueued(t *testing.T) {
	f := newFull(t, nil)
	f.fillOf(f.cache.uid)
	a := f.acquire(f.held(1))
	require.True(t, a.Unkept)
	require.NotContains(t, a.Warnings[0], "not kept yet")
	require.Equal(t, []string{EventUnkept}, f.kinds(a.RequestKey))
	require.EqualValues(t, 1, f.cache.index.Counters()["unkept"])
	f.makeRoom()
}
