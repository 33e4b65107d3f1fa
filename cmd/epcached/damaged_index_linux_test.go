package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// A daemon with a damaged database answers its current requests, says why, and ends.
// The next daemon serves the builds that were stored.
func TestDaemonWithADamagedIndexEndsAndTheNextOneRepairsIt(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	dir := t.TempDir()
	kept, heard, other := writeModel(t, dir, 1), writeModel(t, dir, 2), writeModel(t, dir, 3)
	d := s.start(t)
	require.Equal(t, "compiled", get(t, d.dial(), kept).Outcome)
	d.stop()

	d = s.start(t)
	follower, asker := d.dial(), d.dial()
	followed, following := make(chan error, 1), make(chan struct{})
	subscribed := sync.OnceFunc(func() { close(following) })
	go func() {
		followed <- follower.Subscribe(limited(t),
			func(*wire.Event) error { subscribed(); return nil })
	}()
	require.Eventually(t, func() bool {
		get(t, asker, heard, refresh)
		select {
		case <-following:
			return true
		default:
			return false
		}
	}, patience, pollEvery)
	require.NoError(t, os.Truncate(filepath.Join(s.state, "index.db"), 8192))
	_, err := tryGet(t, asker, other)
	require.ErrorIs(t, err, unixsock.ErrUnavailable)
	require.ErrorContains(t, err, "the index is damaged")
	require.ErrorIs(t, <-followed, unixsock.ErrUnavailable)
	d.wait()
	var exit *exec.ExitError
	require.ErrorAs(t, d.err, &exit)
	require.Equal(t, exitDamage, exit.ExitCode())
	require.Equal(t, 1, strings.Count(d.log.String(), "index.db is damaged"), d.log.String())
	require.Contains(t, d.log.String(), "hint: start it again")

	d = s.start(t)
	require.Equal(t, "hit", get(t, d.dial(), kept, onMissFail).Outcome)
	require.Contains(t, strings.Join(d.status().Warnings, "; "), "a page cannot be read")
}

// slowStart is a daemon that opens its store when a test lets it.
type slowStart struct {
	*process
	socket        string
	opens, opened chan struct{} // the store is being opened, and may be
	ended         chan error
	stop          context.CancelFunc
}

// startSlowly runs a daemon in this process that takes long to make its index.
func startSlowly(t *testing.T, ready func()) *slowStart {
	dir := shortDir(t)
	settings := config.Defaults()
	settings.State, settings.Socket = filepath.Join(dir, "state"), filepath.Join(dir, "s")
	settings.Worker = filepath.Join(programs, "epcached-ort")
	ctx, stop := context.WithCancel(context.Background())
	d := &slowStart{socket: settings.Socket, opens: make(chan struct{}),
		opened: make(chan struct{}),
		ended:  make(chan error, 1), stop: stop}
	d.process = &process{stderr: &syncBuffer{}, ready: ready,
		read: func() (*config.Settings, *rules.Set, error) { return settings, nil, nil },
		open: func(dir string, o cache.Options) (*cache.Cache, error) {
			o.OnOpening("the index is being made: 7 builds, 3 %")
			close(d.opens)
			<-d.opened
			return cache.Open(dir, o)
		}}
	go func() { d.ended <- d.serve(ctx, settings, nil) }()
	return d
}

func (d *slowStart) dial(t *testing.T) (*unixsock.Client, error) {
	return unixsock.Dial(limited(t), d.socket)
}

// While the index is made a client hears at once that the daemon is starting, and is served when
// that is done, on the same socket.
func TestClientsOfADaemonThatMakesItsIndexGoOnAtOnce(t *testing.T) {
	answers := make(chan struct{}, 2)
	d := startSlowly(t, func() { answers <- struct{}{} })
	<-d.opens
	<-answers // the client that started it need not wait for the index either
	for range 2 {
		_, err := d.dial(t)
		require.ErrorIs(t, err, unixsock.ErrUnavailable)
		require.ErrorContains(t, err,
			"the daemon is starting: the index is being made: 7 builds, 3 %")
	}
	close(d.opened)
	require.Eventually(t, func() bool {
		c, err := d.dial(t)
		if err != nil {
			require.ErrorIs(t, err, unixsock.ErrUnavailable)
			return false
		}
		_, err = unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
		return errors.Join(err, c.Close()) == nil
	}, patience, pollEvery)
	require.Empty(t, answers, "it is said once")
	d.stop()
	require.NoError(t, <-d.ended)
	require.NoFileExists(t, d.socket)
}

// A daemon that cannot open its store after all leaves no socket behind.
func TestASlowStartThatFailsLeavesNoSocket(t *testing.T) {
	d := startSlowly(t, nil)
	defer d.stop()
	<-d.opens
	state := filepath.Join(filepath.Dir(d.socket), "state")
	require.NoError(t, os.WriteFile(filepath.Join(state, "journal"), newerJournal(), 0o600))
	close(d.opened)
	require.ErrorContains(t, <-d.ended, "newer epcached")
	require.NoFileExists(t, d.socket)
}

// That holds too if the server has only begun to serve.
func TestAnEntranceThatClosesAtOnceLeavesNoSocket(t *testing.T) {
	socket := filepath.Join(shortDir(t), "s")
	for range 100 {
		e := new(process).newEntrance(socket, slog.New(slog.DiscardHandler))
		e.refuseClients("the index is being made")
		require.FileExists(t, socket)
		require.NoError(t, e.close())
		require.NoFileExists(t, socket)
	}
}

func newerJournal() []byte {
	return append([]byte("epcjrnal\x63"), bytes.Repeat([]byte{0}, 64)...)
}
