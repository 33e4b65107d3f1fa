package workspace

import (
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// A file system may state any size. Copies that fit one by one, and not together, are refused, and so
// are sizes that a sum cannot hold.
func TestCopiesOfSlowFilesShareTheFreeSpace(t *testing.T) {
	st, err := store.Open(filepath.Join(t.TempDir(), "state"), store.Options{Now: time.Now,
		Log: slog.New(slog.DiscardHandler), Published: func(*index.Build, uint32) {},
		Withheld: func(*index.Build) {}, Compiling: func() bool { return false }})
	require.NoError(t, err)
	defer func() { require.NoError(t, st.Close()) }()
	b, err := st.Bounds()
	require.NoError(t, err)
	in := &Maker{Store: st}
	large := uint64((b.Free - b.Floor) / 3)
	require.NoError(t, in.reserveSlow(large))
	require.ErrorIs(t, in.reserveSlow(large), unix.ENOSPC)
	for _, size := range []uint64{1 << 62, 1<<63 - 1, 1 << 63, 1<<64 - 1} {
		require.ErrorIs(t, in.reserveSlow(size), unix.ENOSPC, size)
	}
	require.EqualValues(t, large, in.slow.Load(), "refused sizes are not set aside")
}
