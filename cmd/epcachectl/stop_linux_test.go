package main

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestStopWaitsForTheEndOfTheProcess(t *testing.T) {
	b := newStandIn(t)
	ends, end, err := os.Pipe()
	require.NoError(t, err)
	b.stop = func() (*os.File, error) { return ends, nil }
	b.serve()
	done := make(chan result, 1)
	go func() { done <- call(t, "stop") }()
	limited := call(t, "status") // the daemon answers meanwhile
	require.Equal(t, exit.Done, limited.code)
	select {
	case got := <-done:
		require.Fail(t, "it did not wait", got.out+got.err)
	default:
	}
	require.NoError(t, end.Close())
	got := <-done
	require.Equal(t, exit.Done, got.code, got.err)
	require.Equal(t, "stopped epcached, pid 77, at /run/s\n", got.out)
	require.Equal(t, "epcachectl: hint: to start it again, run the command that started it\n",
		got.err)
}

func TestStopNamesWhatStartsTheDaemon(t *testing.T) {
	for by, says := range map[string]string{
		"socket":  "systemctl stop epcached.socket epcached.service",
		"service": "systemctl start epcached.service",
		"client":  "EPCACHE_AUTOSTART=0",
	} {
		b := newStandIn(t)
		b.startedBy = by
		b.stop = func() (*os.File, error) {
			ends, end, err := os.Pipe()
			require.NoError(t, err)
			return ends, end.Close()
		}
		b.serve()
		require.Contains(t, call(t, "stop").err, says)
		out := parseJSON(t, call(t, "stop", "--json"))
		require.Equal(t, by, jsonAt(t, out, "started_by"))
		require.EqualValues(t, 77, jsonAt(t, out, "pid"))
		require.Contains(t, jsonAt(t, out, "again"), says)
		require.Contains(t, call(t, "status").out, startedBy[by])
	}
}

func TestStopThatIsNotAllowed(t *testing.T) {
	b := newStandIn(t)
	b.stop = func() (*os.File, error) {
		return nil,
			&unixsock.Error{Class: wire.ErrorClass_NOT_ALLOWED, Text: "the daemon of uid 5",
				Hint: "be uid 5"}
	}
	b.serve()
	got := call(t, "stop")
	require.Equal(t, exit.NotAllowed, got.code)
	require.Equal(t, "epcachectl: stop: the daemon of uid 5\nepcachectl: hint: be uid 5\n", got.err)
}

func TestStopStartsNoDaemon(t *testing.T) {
	dir := emptyHome(t, `touch "$HOME/told"`+"\n")
	require.Equal(t, exit.NoDaemon, call(t, "stop").code)
	require.NoFileExists(t, dir+"/told")
}

// Another program may listen on the socket: that is not a usage error.
func TestStopOfAnotherProgramFindsNoDaemon(t *testing.T) {
	dir, err := os.MkdirTemp("", "ectl") // short, for a socket
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	path := filepath.Join(dir, "s")
	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, listener.Close()) })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("HTTP/1.1 200 OK\r\n\r\n"))
			_ = conn.Close()
		}
	}()
	got := call(t, "stop", "--wait", "100ms", "--socket", path)
	require.Equal(t, exit.NoDaemon, got.code, got.err)
	require.Contains(t, got.err, path)
}
