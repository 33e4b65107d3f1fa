package store

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// publishOne publishes a build of random bytes.
func publishOne(t *testing.T, st *Store) *index.Build {
	t.Helper()
	b, dir := stageBuild(t, st)
	hold := st.Blobs().Hold()
	defer st.Packing().Release(hold)
	require.NoError(t, st.Publish(t.Context(), Publication{Build: b, Dir: dir, Kind: "test"}, hold))
	return b
}

// An error of one change leaves the others of its batch alone, and an eviction finds the pin that
// came with it.
func TestChangesOfOneBatchAreEachByThemselves(t *testing.T) {
	st := openBench(t)
	kept, gone := publishOne(t, st), publishOne(t, st)
	staged, dir := stageBuild(t, st)
	_ = dir
	staged.ID = index.BuildID{1} // its blobs are not looked at
	for i := range staged.Files {
		staged.Files[i].Size = 1
	}
	publication, err := st.index.Stage(t.Context(), *staged)
	require.NoError(t, err)
	events := 0
	pin := &commitRequest{marks: []*index.Mark{{ID: kept.ID,
		Pin: &index.Pin{At: time.Now(), UID: 7}}, {ID: index.BuildID{9}, Pin: &index.Pin{}}},
		done: make(chan struct{})}
	retract := func(id index.BuildID) *change {
		return &change{Change: &index.Change{ID: id}, then: func() { events++ }, may: func() bool {
			_, pinned := st.index.Journal.Pinned(id)
			return !pinned
		}}
	}
	builds := &commitRequest{builds: []*change{retract(kept.ID), retract(gone.ID),
		retract(index.BuildID{9}), {Change: publication}, retract(gone.ID)},
		done: make(chan struct{})}
	st.committer.commitBatch([]*commitRequest{builds, pin})
	<-pin.done
	<-builds.done
	require.NoError(t, pin.marks[0].Err)
	require.ErrorIs(t, pin.marks[1].Err, index.ErrNotFound)
	done := func(i int) bool { return builds.builds[i].done }
	require.Equal(t, []bool{false, true, false, true, false},
		[]bool{done(0), done(1), done(2), done(3), done(4)})
	require.NoError(t, builds.builds[0].Err, "it is pinned")
	require.ErrorIs(t, builds.builds[2].Err, index.ErrNotFound)
	require.ErrorIs(t, builds.builds[4].Err, index.ErrNotFound)
	require.Equal(t, 1, events)
	_, err = st.index.Get(staged.ID)
	require.NoError(t, err)
	_, err = st.index.Get(kept.ID)
	require.NoError(t, err)
}

// A change that was handed in is done even if its caller has left.
func TestAChangeIsDoneThoughItsCallerLeaves(t *testing.T) {
	st := openBench(t)
	b := publishOne(t, st)
	ctx, leave := context.WithCancel(t.Context())
	var once sync.Once
	h := &commitRequest{builds: []*change{{Change: &index.Change{ID: b.ID}, may: func() bool {
		once.Do(leave)
		time.Sleep(10 * time.Millisecond)
		return true
	}}}}
	require.ErrorIs(t, st.committer.commit(ctx, h), context.Canceled)
	<-h.done
	require.True(t, h.builds[0].done)
}

// A change waits for publications that are just being staged, and for no others.
func TestBatchWaitsForStagedPublications(t *testing.T) {
	st := openBench(t)
	c := &committer{index: st.index, queue: make(chan *commitRequest), stop: make(chan struct{})}
	require.Len(t, c.batch(&commitRequest{}), 1)
	c.expected.Add(1)
	began := time.Now()
	require.Len(t, c.batch(&commitRequest{}), 1, "it did not come")
	require.GreaterOrEqual(t, time.Since(began), batchWait)
	go func() {
		c.expected.Add(-1)
		c.queue <- &commitRequest{}
	}()
	for n := 1; n < 2; { // the goroutine may not have begun
		n = len(c.batch(&commitRequest{}))
	}
}

// holdCommitter keeps the committer busy until release is called.
func holdCommitter(t *testing.T, st *Store) (release func()) {
	t.Helper()
	held, free := make(chan struct{}), make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		_ = st.committer.commit(context.Background(), &commitRequest{builds: []*change{{
			Change: &index.Change{}, may: func() bool {
				close(held)
				<-free
				return false
			}}}})
	})
	<-held
	return sync.OnceFunc(func() {
		close(free)
		done.Wait()
	})
}

// A pin that waits for an earlier one ends with its context.
func TestPinWaitsAtMostUntilItsContextEnds(t *testing.T) {
	st := openBench(t)
	b := publishOne(t, st)
	release := holdCommitter(t, st)
	defer release()
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- st.Pin(context.Background(), b.ID, &index.Pin{}) }()
	time.Sleep(20 * time.Millisecond) // so that it comes first
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	go func() { second <- st.Pin(ctx, b.ID, &index.Pin{}) }()
	select {
	case err := <-second:
		require.ErrorIs(t, err, context.DeadlineExceeded)
	case <-time.After(10 * time.Second):
		t.Error("it waits although its context has ended")
	}
	release()
	require.NoError(t, <-first)
}

// Pins of one batch are checked against the share one after the other.
func TestPinsOfOneBatchStayWithinTheShare(t *testing.T) {
	st := openBench(t)
	st.options.Bound = func(uid uint32) bool { return uid == 7 }
	st.SetSettings(Settings{Space: SpaceOptions{Budget: Amount{Bytes: 1 << 30},
		UserShare: Amount{Bytes: 100 << 10}}}) // of builds with 66 KiB
	builds := []*index.Build{publishOne(t, st), publishOne(t, st), publishOne(t, st)}
	release := holdCommitter(t, st)
	defer release()
	errs := make(chan error, len(builds))
	for i, b := range builds {
		go func() {
			errs <- st.Pin(context.Background(), b.ID, &index.Pin{UID: []uint32{7, 7, 8}[i]})
		}()
	}
	time.Sleep(20 * time.Millisecond) // so that they wait together
	release()
	failed := 0
	for range builds {
		if err := <-errs; err != nil {
			require.ErrorContains(t, err, "uid 7 has pinned")
			failed++
		}
	}
	require.Equal(t, 1, failed)
	require.Len(t, st.index.Journal.PinnedBuilds(), 2)
}

// Removed bytes are in an account before the event, because writing that may take long.
func TestRemovedBytesAreCountedBeforeTheEvent(t *testing.T) {
	var st *Store
	var removing []int64
	st = openBench(t, func(o *Options) {
		o.Heard = func(e index.Event) {
			if e.Kind == "retracted" {
				st.ledger.mu.Lock()
				defer st.ledger.mu.Unlock()
				removing = append(removing, st.ledger.removing)
			}
		}
	})
	list := []Removal{{Build: publishOne(t, st), Why: "test"}}
	require.NoError(t, st.RemoveAll(list))
	require.NoError(t, list[0].Err)
	require.Len(t, removing, 1)
	require.GreaterOrEqual(t, removing[0], int64(66<<10))
}
