package main

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/internal/slowfile"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// A model on a FUSE file system is compiled and found as any other.
func TestModelOnFUSEIsServed(t *testing.T) {
	t.Parallel()
	dir, _ := mountFUSE(t, writeModel(t, t.TempDir(), 1))
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	first := get(t, d.dial(), filepath.Join(dir, "sound.onnx"))
	require.Equal(t, "compiled", first.Outcome)
	require.Equal(t, "hit", get(t, d.dial(), filepath.Join(dir, "sound.onnx")).Outcome)
	require.Equal(t, first.RequestKey, get(t, d.dial(), writeModel(t, t.TempDir(), 1)).RequestKey,
		"the bytes are what counts")
	require.Equal(t, "shared", d.list()[0].Scope, "as of a file that all may read")
	require.Empty(t, entriesOf(t, d.state, "staging"))
}

// askUntil asks for the model with a deadline that the daemon alone keeps.
func askUntil(t *testing.T, c *unixsock.Client, f *os.File, milliseconds int64) error {
	r := forModel(f.Name())
	r.DeadlineMs = milliseconds
	ctx := limited(t)
	_, _, err := c.Acquire(ctx, r, []*os.File{f}, nil, nil)
	if ctx.Err() != nil {
		t.Error("the daemon did not answer")
	}
	return err
}

// Files that never answer hold few threads and processes of the daemon's, requests with them end at
// their deadlines, and others are served meanwhile. Nothing is left when the file system is gone.
func TestFilesThatNeverAnswer(t *testing.T) {
	const connections, requests = 40, 400
	for _, name := range []string{"silent.onnx", "dead.onnx"} {
		t.Run(name, func(t *testing.T) {
			dir, kill := mountFUSE(t, writeModel(t, t.TempDir(), 1))
			d := newSite(t, runtimeDir(t, openVINO)).start(t)
			local := writeModel(t, t.TempDir(), 2)
			other := dialAs(t, d.socket, bystander)
			get(t, other, local)
			before := d.threads()

			files := make([]*os.File, requests)
			for i := range files {
				files[i] = openFile(t, filepath.Join(dir, name))
			}
			t.Cleanup(kill) // before the files are closed
			var asking sync.WaitGroup
			var clients []*unixsock.Client
			for range connections {
				clients = append(clients, dialAs(t, d.socket, flooder))
			}
			for i, f := range files {
				c := clients[i%connections]
				asking.Go(func() {
					err := askUntil(t, c, f, 500)
					if err == nil {
						t.Error("a model that cannot be read was served")
					}
				})
			}
			require.Equal(t, "hit", get(t, other, local).Outcome)
			asking.Wait()
			require.Less(t, d.threads(), before+100, "of %d requests", requests)
			require.Equal(t, "hit", get(t, other, local).Outcome)
			// A worker that starts closes what the daemon still has open.
			require.Eventually(t, func() bool { return d.open(dir) == 0 }, patience,
				time.Millisecond)
			require.Equal(t, "compiled", get(t, other, writeModel(t, t.TempDir(), 3)).Outcome)

			kill()
			require.Eventually(t, func() bool {
				return len(processesOf(slowfile.Argument)) == 0 && d.open(dir) == 0
			}, patience, 10*time.Millisecond, "something is left")
			_, err := unixsock.Ask[wire.StatusReply](limited(t), dialAs(t, d.socket, flooder),
				&wire.Status{}, nil)
			require.NoError(t, err, "the user is served again")
			require.Empty(t, entriesOf(t, d.state, "staging"))
		})
	}
}

// The daemon itself never waits for a file: it stops while reads of one are not answered.
func TestDaemonStopsThoughAFileIsNotAnswered(t *testing.T) {
	dir, kill := mountFUSE(t, writeModel(t, t.TempDir(), 1))
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	f := openFile(t, filepath.Join(dir, "silent.onnx"))
	t.Cleanup(kill)
	c := d.dial()
	require.Eventually(t, func() bool {
		err := askUntil(t, c, f, 500)
		// the kernel does not end it before the answer
		return errors.Is(err, unixsock.ErrDeadline) && len(processesOf(slowfile.Argument)) > 0
	}, patience, time.Millisecond)
	d.stop()
}

// A worker that starts closes what the daemon has open. If a file system never answers that, the
// request for another model fails with the reason, and the daemon compiles again afterwards. It
// takes as long as a start may.
func TestAFileThatBlocksStartsOfWorkers(t *testing.T) {
	t.Parallel()
	dir, kill := mountFUSE(t, writeModel(t, t.TempDir(), 1))
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	other := dialAs(t, d.socket, bystander)
	get(t, other, writeModel(t, t.TempDir(), 2))
	f := openFile(t, filepath.Join(dir, "dead.onnx"))
	t.Cleanup(kill) // before the file is closed
	asked := make(chan error, 1)
	go func() { asked <- askUntil(t, dialAs(t, d.socket, flooder), f, 60_000) }()
	require.Eventually(t, func() bool { return d.open(dir) > 0 }, patience, time.Millisecond)
	_, err := tryGet(t, other, writeModel(t, t.TempDir(), 3))
	require.ErrorContains(t, err, "a FUSE file system that does not answer")
	kill()
	require.Error(t, <-asked)
	require.Equal(t, "compiled", get(t, other, writeModel(t, t.TempDir(), 4)).Outcome)
}
