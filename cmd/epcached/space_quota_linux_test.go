package main

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// dialAs connects as another user: the kernel reports to the daemon the uid of the connecting
// thread.
func (in *inside) dialAs(t *testing.T,
	uid int) *unixsock.Client {
	return dialAs(t, in.socket, uid)
}

func dialAs(t testing.TB, socket string, uid int) *unixsock.Client {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can connect as another user")
	}
	require.NoError(t, os.Chmod(filepath.Dir(socket), 0o711))
	dialled := make(chan *unixsock.Client, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its uid
		defer close(dialled)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid),
			^uintptr(0)); errno != 0 {
			return
		}
		if c, err := unixsock.Dial(context.Background(), socket); err == nil {
			dialled <- c
		}
	}()
	c := <-dialled
	require.NotNil(t, c, "cannot connect as uid %d", uid)
	t.Cleanup(func() { c.Close() })
	require.EqualValues(t, uid, c.Hello().Uid)
	return c
}

// Each user has an own quota, counted by the uid that the kernel reports. A user over quota loses
// own builds, the least valuable ones, and another user's stay; a model that is larger than the
// quota is not kept, and the answer says so with the numbers.
func TestQuotasOfTwoUsers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can connect as another user")
	}
	const greedy, modest = 65534, 65533
	const quota = 16 << 10
	in := serveInside(t, filepath.Join(inMemory(t), "state"),
		cache.Options{Space: store.SpaceOptions{UserBytes: store.Amount{Bytes: quota}}})
	dir := t.TempDir()
	take := func(c *unixsock.Client, seed uint64, width int) *wire.AcquireReply {
		t.Helper()
		path := filepath.Join(dir, "model.onnx")
		// closed to others: the build is its user's own
		require.NoError(t, os.WriteFile(path, compilertest.Dense(seed, width, 1), 0o600))
		request := forModel(path, &wire.ExecutionProvider{Name: standin.EP})
		request.HoldsView = true
		reply, view, err := c.Acquire(limited(t), request, []*os.File{openFile(t, path)}, nil, nil)
		require.NoError(t, err)
		require.NoError(t, view.Close())
		return reply
	}
	root, err := in.dial(t)
	require.NoError(t, err)
	defer root.Close()
	sizes := func() map[string]int64 {
		usage, err := unixsock.Ask[wire.UsageReply](limited(t), root, &wire.Usage{}, nil)
		require.NoError(t, err)
		out := make(map[string]int64)
		for _, u := range usage.Users {
			out[u.Name] = u.LogicalBytes
		}
		return out
	}
	first, second := in.dialAs(t, greedy), in.dialAs(t, modest)
	take(second, 100, 24)
	for seed := range uint64(12) {
		take(first, seed, 24)
	}
	require.Eventually(t, func() bool { return sizes()["uid:65534"] <= quota }, patience, pollEvery,
		"%v", sizes())
	after := sizes()
	require.Positive(t, after["uid:65534"])
	require.Positive(t, after["uid:65533"])
	again := take(second, 100, 24)
	require.Equal(t, "hit", again.Outcome, "another's greed costs it nothing")

	events, err := unixsock.Ask[wire.EventsReply](limited(t), root, &wire.Events{}, nil)
	require.NoError(t, err)
	told := 0
	for _, e := range events.Events {
		if strings.Contains(e.Text, "uid 65534 ") &&
			strings.Contains(e.Text, "more than its quota of 16.0 KiB") {
			told++
		}
		require.NotContains(t, e.Text, "uid 65533 has")
	}
	require.Positive(t, told)

	large := take(first, 200, 128)
	require.Equal(t, "compiled", large.Outcome)
	require.Contains(t, strings.Join(large.Warnings, " "), "not stored: it has ")
	require.Contains(t, strings.Join(large.Warnings, " "), "and uid 65534 has ")
	require.Contains(t, strings.Join(large.Warnings, " "), "of at most 16.0 KiB")
}
