package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// A user may do with its descriptor of a shared view what the kernel allows: other users still get
// the build, and the collector still leaves the view to those that hold it.
func TestExclusiveLockOnALeaseKeepsNoOtherUserFromTheBuild(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can connect as another user")
	}
	const hostile, other = 65534, 65533
	in := serveInside(t, filepath.Join(inMemory(t), "state"), cache.Options{})
	path := writeModel(t, t.TempDir(), 1)
	take := func(c *unixsock.Client) lease {
		t.Helper()
		request := forModel(path, &wire.ExecutionProvider{Name: standin.EP})
		request.OnMiss, request.HoldsView = wire.OnMiss_FAIL, true
		reply, view, err := c.Acquire(limited(t), request, []*os.File{openFile(t, path)}, nil, nil)
		require.NoError(t, err)
		t.Cleanup(func() { view.Close() })
		return lease{reply, view}
	}
	root, err := in.dial(t)
	require.NoError(t, err)
	defer root.Close()
	reply, view, err := root.Acquire(limited(t),
		forModel(path, &wire.ExecutionProvider{Name: standin.EP}),
		[]*os.File{openFile(t, path)}, nil, nil)
	require.NoError(t, err)
	require.Equal(t, "compiled", reply.Outcome)
	require.NoError(t, view.Close())

	locked := take(in.dialAs(t, hostile))
	require.NoError(t, unix.Flock(int(locked.view.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	got := take(in.dialAs(t, other))
	require.Equal(t, "hit", got.Outcome)

	// The holder's lock is no way to end another's lease either.
	require.NoError(t, unix.Flock(int(locked.view.Fd()), unix.LOCK_UN))
	require.NoError(t, locked.view.Close())
	_, err = unixsock.Ask[wire.ChangeReply](limited(t), root,
		&wire.Remove{Entries: []string{got.Build}}, nil)
	require.NoError(t, err)
	_, err = unixsock.Ask[wire.CollectReply](limited(t), root, &wire.Collect{}, nil)
	require.NoError(t, err)
	require.NoError(t, got.wrong())
}
