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
