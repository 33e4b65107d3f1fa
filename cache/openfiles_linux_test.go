package cache

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/views"
)

// elsewhere opens a file in another process, until closed.
func (b *bench) elsewhere(path string) (closed func()) {
	b.Helper()
	f := b.openFile(path)
	other := exec.Command("sleep", "60")
	other.ExtraFiles = []*os.File{f}
	require.NoError(b, other.Start())
	require.NoError(b, f.Close())
	closed = sync.OnceFunc(func() {
		_ = other.Process.Kill() // its end is what is wanted, however it comes
		_ = other.Wait()
	})
	b.Cleanup(closed)
	return closed
}

// Files that a client released but still has mapped are not free: they stay, and count.
func TestOpenFilesStayAndCount(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.held(1))
	closed := b.elsewhere(a.Path + "/" + a.Graph)
	require.NoError(t, a.View.Close())
	require.Equal(t, store.KeptInUse, b.cache.Store.Collector().
		WhyProtected(a.Build.ID, &views.OwnFiles{}))
	_, err := b.cache.Remove(context.Background(), request.Peer{UID: b.cache.uid}, nil, true, false)
	require.NoError(t, err)
	b.cache.views.Sweep()
	require.EqualValues(t, 2*cas.Block, b.account().UnlinkedOpen)
	closed()
	b.cache.views.Sweep()
	require.Zero(t, b.account().UnlinkedOpen)
	require.NoDirExists(t, a.Path)
}

// Blobs that only the daemon reads are not in use: they are planned for eviction, and evicted after
// the read. If a client has them too they stay.
func TestTheDaemonsReadsDoNotProtectBuilds(t *testing.T) {
	b, builds := stored(t, 2)
	path := func(i int) string {
		v, done := b.cache.views.Borrow(builds[i].ID)
		defer done()
		return filepath.Join(v.Path(), v.ID(), builds[i].Graph)
	}
	read, both := b.openFile(path(0)), b.openFile(path(1))
	b.elsewhere(path(1))
	require.Equal(t, store.KeptReading, b.cache.Store.Collector().
		WhyProtected(builds[0].ID, &views.OwnFiles{}))
	plan := b.plan(0)
	require.Len(t, plan.Steps, 2)
	var over atomic.Bool
	time.AfterFunc(20*time.Millisecond, func() {
		over.Store(true)
		_, _ = read.Close(), both.Close()
	})
	b.collect(plan)
	require.True(t, over.Load(), "it is protected while it is read")
	outcomes := map[index.BuildID]string{plan.Steps[0].ID: plan.Steps[0].Outcome,
		plan.Steps[1].ID: plan.Steps[1].Outcome}
	require.Equal(t,
		map[index.BuildID]string{builds[0].ID: "removed", builds[1].ID: "kept: in use"}, outcomes)
}

// A collection that makes space for a request does not wait for a comparison of blobs which waits
// for the end of that request.
func TestCollectionEndsComparisons(t *testing.T) {
	b, builds := stored(t, 2)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s := b.cache.Store.Packer()
	defer s.BeginRequest()()
	waits := make(chan struct{})
	compared := make(chan error, 1)
	go func() {
		v, done := b.cache.views.Borrow(builds[0].ID)
		defer done()
		f, err := os.Open(filepath.Join(v.Path(), v.ID(), builds[0].Graph))
		if err == nil {
			defer f.Close()
			close(waits)
			err = s.AwaitIdleRead(ctx)
		}
		compared <- err
	}()
	<-waits
	require.Equal(t, store.KeptReading, b.cache.Store.Collector().
		WhyProtected(builds[0].ID, &views.OwnFiles{}))
	plan := b.plan(0)
	b.collect(plan)
	require.Equal(t, []string{"removed", "removed"}, outcomes(plan, builds[0].ID, builds[1].ID))
	require.ErrorIs(t, <-compared, store.ErrCollected)
	require.Empty(t, b.list())
}
