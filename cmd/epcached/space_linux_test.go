package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cmd/epcached/internal/backend"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// inside is a daemon in this process, over a real socket, with the stand-in compiler: it compiles
// in no time, so that what is tried is the store.
type inside struct {
	cache  *cache.Cache
	socket string
}

func serveInside(t testing.TB, state string, o cache.Options) *inside {
	runtime := filepath.Join(t.TempDir(), "runtime")
	if o.Compiler == nil {
		o.Compiler = standin.New()
	}
	_, err := standin.Library(runtime, "1.31.1", standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	o.Runtimes, o.Log = []compilers.Runtime{{Directory: runtime}},
		slog.New(slog.NewTextHandler(io.Discard, nil))
	o.Policies = map[string]request.Policy{"": {MeasureGain: new(bool)}}
	c, err := cache.Open(state, o)
	require.NoError(t, err)
	in := &inside{cache: c, socket: filepath.Join(shortDir(t), "s")}
	l, err := (&process{}).listen(in.socket)
	require.NoError(t, err)
	b := backend.New()
	b.Cache, b.Socket = c, in.socket
	b.Server = &unixsock.Server{Backend: b, Name: "epcached test", Log: o.Log,
		Errors: backend.WireError}
	done := make(chan error, 1)
	go func() { done <- b.Server.Serve(context.Background(), l) }()
	t.Cleanup(func() {
		require.NoError(t, b.Server.Shutdown(context.Background()))
		require.NoError(t, <-done)
		require.NoError(t, c.Close())
	})
	return in
}

func (in *inside) dial(t testing.TB) (*unixsock.Client, error) {
	return unixsock.Dialer{Name: "test", Wait: patience}.Dial(limited(t), in.socket)
}

// inMemory is a directory for a store that is changed thousands of times: what a power cut takes
// away is tested elsewhere.
func inMemory(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "epcached")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// short returns the files of a view that are not there, or not as long as was promised.
func (a lease) short() (err error) {
	for _, f := range a.Files {
		path := filepath.Join(fmt.Sprintf("/proc/self/fd/%d", a.view.Fd()), f.Name)
		info, statErr := os.Stat(path)
		if statErr != nil {
			err = errors.Join(err, statErr)
		} else if info.Size() != f.Size {
			err = errors.Join(err,
				fmt.Errorf("%s: %d bytes, promised were %d", f.Name, info.Size(), f.Size))
		}
	}
	return err
}

// requireNothingFound requires a sound store with an exact account.
func requireNothingFound(t testing.TB, c *unixsock.Client) {
	t.Helper()
	check := func() string {
		deep, err := unixsock.Ask[wire.CheckReply](limited(t), c, &wire.Check{Deep: true}, nil)
		require.NoError(t, err)
		space, err := unixsock.Ask[wire.CheckReply](limited(t), c, &wire.Check{Space: true}, nil)
		require.NoError(t, err)
		text := fmt.Sprint(append(deep.Findings, space.Findings...))
		for _, l := range space.Space {
			if l.AccountedBytes != nil && l.GetAccountedBytes() != l.DiskBytes {
				text += fmt.Sprintf(" %s: %d on disk, %d accounted", l.Name, l.DiskBytes,
					l.GetAccountedBytes())
			}
		}
		return text
	}
	found := check()
	for end := time.Now().Add(patience / 3); found != "[]" &&
		time.Now().Before(end); found = check() {
		time.Sleep(10 * pollEvery) // the last views are swept in the background
	}
	require.Equal(t, "[]", found)
}
