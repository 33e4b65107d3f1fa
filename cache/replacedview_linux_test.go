package cache

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/store/views"
)

// atManifest calls a function once, right before the manifest of a build is removed.
type atManifest struct {
	cas.OS
	do func()
}

func (a *atManifest) Remove(path string) error {
	if do := a.do; do != nil && strings.Contains(path, "/manifests/") &&
		!strings.Contains(path, "incoming") {
		a.do = nil
		do()
	}
	return a.OS.Remove(path)
}

// A view that replaces a damaged one just while its build is removed is removed with it, and counts
// as long as a client has it open.
func TestViewIsReplacedWhileItsBuildIsRemoved(t *testing.T) {
	at := &atManifest{}
	b := newBenchWith(t, func(o *Options) { o.fs = at })
	a := b.use(1)
	previous := b.cache.views.CurrentView(a.Build.ID)
	require.NotNil(t, previous)
	var made *views.View
	var lease *os.File
	at.do = func() {
		inner := filepath.Join(previous.Path(), previous.ID())
		require.NoError(t, os.Chmod(inner, 0o700))
		require.NoError(t, os.Remove(filepath.Join(inner, a.Build.Graph)))
		var err error
		made, err = b.cache.views.Get(context.Background(), a.Build, func() {})
		require.NoError(t, err)
		lease, err = made.Lease()
		require.NoError(t, err)
	}
	require.NoError(t, b.remove(a.Build))
	require.Nil(t, at.do)
	require.NotEqual(t, previous.Path(), made.Path())
	require.Nil(t, b.cache.views.CurrentView(a.Build.ID))
	require.NoDirExists(t, previous.Path())
	require.DirExists(t, made.Path(), "it is in use")
	require.EqualValues(t, 2*cas.Block, b.account().UnlinkedOpen)
	b.exact()
	require.NoError(t, lease.Close())
	b.cache.views.Sweep()
	require.NoDirExists(t, made.Path())
	require.Zero(t, b.account().UnlinkedOpen)
	b.exact()
}

// A view that lost its unpacked copies with an earlier boot is not served again: files that only it
// has are removed soon after the start, or count.
func TestStartRemovesViewsWithoutUnpackedCopies(t *testing.T) {
	b, builds, files := packedPair(t)
	for _, held := range []bool{false, true} {
		r := b.variant(2)
		r.KeepsView = true
		a := b.acquire(r)
		require.Equal(t, files[1], b.read(a))
		if !held {
			require.NoError(t, a.View.Close())
		}
		require.NoError(t, b.cache.index.UnpackedStamps().ForgetStamp(large(builds[1])))
		b.reopen()
		<-b.cache.sweptUnpacked
		// one that background work has just then stays for a while
		require.Eventually(t, func() bool {
			b.cache.views.Sweep()
			_, err := os.Lstat(a.Path)
			return held || os.IsNotExist(err)
		}, soon, time.Millisecond)
		b.exact()
		if held {
			require.Greater(t, b.account().UnlinkedOpen, int64(1<<20))
			require.Equal(t, files[1], b.read(a))
		} else {
			require.Zero(t, b.account().UnlinkedOpen)
		}
	}
}
