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

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
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

// What a client has let go of and still has mapped is not free: it stays, and counts.
func TestWhatIsOpenStaysAndCounts(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.held(1))
	closed := b.elsewhere(a.Path + "/" + a.Graph)
	require.NoError(t, a.View.Close())
	require.Equal(t, keptInUse, b.cache.spared(a.Build.ID, &ownFiles{}))
	_, _, err := b.cache.Remove(context.Background(), Peer{UID: b.cache.uid}, nil, true, false)
	require.NoError(t, err)
	b.cache.sweepViews()
	require.EqualValues(t, 2*cas.Block, b.account().held)
	closed()
	b.cache.sweepViews()
	require.Zero(t, b.account().held)
	require.NoDirExists(t, a.Path)
}

// What the daemon itself reads is in no use: it is planned to go, and goes when that is over. But where somebody else has it too it stays.
func TestTheDaemonsOwnReadingIsNoUse(t *testing.T) {
	b, builds := stored(t, 2)
	path := func(i int) string {
		v, done := b.cache.viewNow(builds[i].ID)
		defer done()
		return filepath.Join(v.path, v.id, builds[i].Graph)
	}
	read, both := b.openFile(path(0)), b.openFile(path(1))
	b.elsewhere(path(1))
	require.Equal(t, keptReading, b.cache.spared(builds[0].ID, &ownFiles{}))
	plan := b.plan(0)
	require.Len(t, plan.Steps, 2)
	var over atomic.Bool
	time.AfterFunc(20*time.Millisecond, func() {
		over.Store(true)
		_, _ = read.Close(), both.Close()
	})
	b.collect(plan)
	require.True(t, over.Load(), "it is protected while it is read")
	outcomes := map[index.BuildID]string{plan.Steps[0].ID: plan.Steps[0].Outcome, plan.Steps[1].ID: plan.Steps[1].Outcome}
	require.Equal(t, map[index.BuildID]string{builds[0].ID: "removed", builds[1].ID: "kept: in use"}, outcomes)
}

// However many files are open, the daemon's own are looked up once for a plan.
func TestOwnFilesAreLookedUpOnce(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
	own := &ownFiles{}
	f := b.openFile(path)
	require.Equal(t, byDaemon, openedBy(path, own))
	require.NoError(t, f.Close())
	require.Equal(t, byNobody, openedBy(path, own), "whatever was looked up before")
	other := filepath.Join(t.TempDir(), "other")
	require.NoError(t, os.WriteFile(other, []byte("x"), 0o600))
	b.openFile(other)
	require.Equal(t, bySomebody, openedBy(other, own), "opened after the look")
	require.Equal(t, byDaemon, openedBy(other, &ownFiles{}))
	require.Equal(t, bySomebody, openedBy(other, nil))
}
