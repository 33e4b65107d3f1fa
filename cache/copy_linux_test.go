package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/filestamp"
	"github.com/epcached/epcached/store"
)

func TestMemo(t *testing.T) {
	if !onBelievableFS(t) {
		t.Skip("SKIPPED: the temporary directory is on a file system whose times are not " +
			"believed, " +
			"so nothing is memoised")
	}
	b := newBench(t)
	b.later.Store(int64(time.Hour))
	r := b.request(b.model(1))
	first := b.acquire(r)
	reads := 0
	count := func(p request.Progress) {
		if p.Phase == "reading" {
			reads++
		}
	}
	a, err := b.cache.Acquire(context.Background(), r, count)
	require.NoError(t, err)
	defer a.View.Close()
	require.Zero(t, reads, "an old and unchanged file is not read again")
	require.Equal(t, first.RequestKey, a.RequestKey)

	// The same inode with other content, by write.
	f, err := os.OpenFile(r.Graph.Name(), os.O_WRONLY|os.O_TRUNC, 0)
	require.NoError(t, err)
	_, err = f.Write(compilertest.Dense(2, 8, 1))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	changed := b.acquire(r)
	require.NotEqual(t, first.RequestKey, changed.RequestKey)
	require.Equal(t, request.Compiled, changed.Outcome)
}

func onBelievableFS(t *testing.T) bool {
	f, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer f.Close()
	_, ok := filestamp.FileSystem(int(f.Fd()))
	return ok
}

func TestHolesAreNotCopied(t *testing.T) {
	b := newBench(t)
	r := b.external(1, nil)
	path := r.External["weights.bin"].Name()
	require.NoError(t, os.Truncate(path, 1<<40))
	copied := int64(-1)
	a, err := b.cache.Acquire(context.Background(), r, func(p request.Progress) {
		if p.Phase == "compiling" && copied < 0 {
			copied = allocated(t, filepath.Join(b.state, "staging"))
		}
	})
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, request.Compiled, a.Outcome)
	require.Positive(t, copied)
	require.Less(t, copied, int64(1<<20), "a terabyte of nothing is not copied")
}

// allocated is the disk space of all files below a directory.
func allocated(t *testing.T, dir string) (n int64) {
	require.NoError(t, filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		var st unix.Stat_t
		require.NoError(t, unix.Stat(p, &st))
		n += st.Blocks * 512
		return nil
	}))
	return n
}

func TestACopyThatCannotFitIsRefusedBefore(t *testing.T) {
	b := newBench(t)
	require.NoError(t, workspace.CheckSpace(b.state, []*os.File{b.model(1)}))
	require.NoError(t, store.Fits("a copy", 1000, 1000+store.CopyReserve))
	require.ErrorContains(t, store.Fits("a copy", 1001, 1000+store.CopyReserve),
		"a copy needs 1001 B, and 16.0 MiB are free, of which 16.0 MiB are reserved for the "+
			"store's own "+
			"files")
	require.Equal(t, apierr.NoSpace,
		apierr.ClassOf(request.StoreError(store.Fits("a copy", 1, 0), "m")))
}
