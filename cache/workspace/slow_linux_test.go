package workspace

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// A file system may state any size. Copies that fit one by one, and not together, are refused, and
// so are sizes that a sum cannot hold.
func TestCopiesOfSlowFilesShareTheFreeSpace(t *testing.T) {
	st, err := store.Open(filepath.Join(t.TempDir(), "state"), store.Options{Now: time.Now,
		Log: slog.New(slog.DiscardHandler), OnPublished: func(*index.Build, uint32) {},
		OnWithheld: func(*index.Build) {}, Compiling: func() bool { return false }})
	require.NoError(t, err)
	defer func() { require.NoError(t, st.Close()) }()
	b, err := st.Bounds()
	require.NoError(t, err)
	in := &Maker{Store: st}
	large := uint64((b.Free - b.Floor) / 3)
	require.NoError(t, in.reserveSlow(1, large))
	require.ErrorIs(t, in.reserveSlow(1, large), unix.ENOSPC)
	for _, size := range []uint64{1 << 62, 1<<63 - 1, 1 << 63, 1<<64 - 1} {
		require.ErrorIs(t, in.reserveSlow(1, size), unix.ENOSPC, size)
	}
	own, all := in.slow.add(1, 0)
	require.EqualValues(t, []int64{int64(large), int64(large)}, []int64{own, all},
		"refused sizes are not set aside")
}

// Copies of one user leave space for those of others, and the refusal names the limit and its key.
func TestCopiesOfSlowFilesOfOneUserLeaveSpaceForOthers(t *testing.T) {
	st, err := store.Open(filepath.Join(t.TempDir(), "state"), store.Options{Now: time.Now,
		Log: slog.New(slog.DiscardHandler), OnPublished: func(*index.Build, uint32) {},
		OnWithheld: func(*index.Build) {}, Compiling: func() bool { return false },
		Settings: store.Settings{Space: store.SpaceOptions{
			Budget: store.Amount{Bytes: 1 << 40}, UserShare: store.Amount{Percent: 25}}},
		Bound: func(uid uint32) bool { return uid != 0 }})
	require.NoError(t, err)
	defer func() { require.NoError(t, st.Close()) }()
	b, err := st.Bounds()
	require.NoError(t, err)
	in := &Maker{Store: st}
	part := uint64((b.Free - b.Floor) / 2 / 10)
	require.NoError(t, in.reserveSlow(1, part))
	require.NoError(t, in.reserveSlow(1, part))
	err = in.reserveSlow(1, part)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "user_share")
	for _, uid := range []uint32{2, 3, 0, 0} {
		require.NoError(t, in.reserveSlow(uid, part), "uid %d", uid)
	}
	require.NoError(t, in.reserveSlow(0, part), "administrators are not bound")
}

// A file system is blamed for a request whose time has passed, and not for one that was cancelled.
func TestACancelledCopyIsCancelled(t *testing.T) {
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer f.Close()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, stop := context.WithTimeout(t.Context(), -1)
	defer stop()
	for ctx, class := range map[context.Context]apierr.Class{cancelled: apierr.Cancelled,
		late: apierr.Deadline, t.Context(): apierr.BadModel} {
		got := notCopiedError(ctx, os.ErrClosed, f)
		require.Equal(t, class, apierr.ClassOf(got), got.Error())
	}
}
