package main

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// maxProgram is the goal for the size of the helper.
const maxProgram = 15_000_000

func TestTheProgramIsSmall(t *testing.T) {
	if testing.Short() {
		t.Skip("it is linked")
	}
	program := filepath.Join(t.TempDir(), "epcached-remote")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	info, err := os.Stat(program)
	require.NoError(t, err)
	t.Logf("%d bytes", info.Size())
	require.Less(t, info.Size(), int64(maxProgram))
}

// started counts the helper's processes by the files that they leave.
func TestAnIdleHelperEndsAndIsStartedAgain(t *testing.T) {
	dir, program := t.TempDir(), filepath.Join(t.TempDir(), "helper")
	own, err := os.Executable()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program,
		[]byte("#!/bin/sh\ntouch "+dir+"/$$\nexec "+own+" serve\n"), 0o700))
	c := remote.New(remote.Options{Program: program,
		Env: []string{"EPCACHED_REMOTE_TEST_IDLE=200ms",
			"PATH=" + os.Getenv("PATH"), "GOCOVERDIR=" + t.TempDir()}})
	c.Configure([]remote.Config{{Name: name, URL: "file://" + t.TempDir()}})
	defer func() { require.NoError(t, c.Close()) }()
	look := func() {
		_, err := c.Look(t.Context(), name, remote.BuildKey(portable.Hash{1}), budget)
		require.ErrorIs(t, err, remote.ErrMissing)
	}
	processes := func() (pids []string) {
		all, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, one := range all {
			pids = append(pids, one.Name())
		}
		return pids
	}
	look()
	look()
	require.Len(t, processes(), 1)
	require.Eventually(t, func() bool {
		_, err := os.Stat("/proc/" + processes()[0])
		return os.IsNotExist(err)
	}, 10*time.Second, 10*time.Millisecond, "it ends")
	look()
	require.Len(t, processes(), 2)
}

// Calls race with the end of an idle process, and none of them is lost.
func TestCallsWhileTheHelperEndsSucceed(t *testing.T) {
	c := client(t, []string{"EPCACHED_REMOTE_TEST_IDLE=1ms"},
		remote.Config{Name: name, URL: "file://" + t.TempDir()})
	for i := range 30 {
		_, err := c.Look(t.Context(), name, remote.BuildKey(portable.Hash{1}), budget)
		require.ErrorIs(t, err, remote.ErrMissing)
		time.Sleep(time.Duration(i%5) * time.Millisecond)
	}
}

// A daemon with a unit as its helper connects to its socket.
func TestAUnitServesConnections(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- newServer(300*time.Millisecond).run(l.AcceptUnix, l) }()
	c := remote.New(remote.Options{Socket: socket})
	c.Configure([]remote.Config{{Name: name, URL: "file://" + t.TempDir()}})
	can, err := c.Hello(t.Context(), name)
	require.NoError(t, err)
	require.Equal(t, all, can)
	_, err = c.Look(t.Context(), name, remote.BuildKey(portable.Hash{1}), budget)
	require.ErrorIs(t, err, remote.ErrMissing)
	require.NoError(t, <-served, "it ends when it is idle")
}

func TestACallThatIsGivenUpEndsInTheHelper(t *testing.T) {
	f := newFixture(t, "https")
	e := export(t, randomBytes(1, 1<<20))
	e.publish(t, f.writer(t))
	ended := make(chan struct{}, 16)
	hang := func(_ http.ResponseWriter, r *http.Request) bool {
		<-r.Context().Done()
		ended <- struct{}{}
		return true
	}
	f.fault.Store(&hang)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, _, err := e.fetch(t, ctx, f.Client)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	<-ended // of the server: the helper has closed the connection
}

func TestTheProgramSaysHowItIsUsed(t *testing.T) {
	for args, want := range map[string]int{"version": 0, "help": 0, "--help": 0, "other": 2} {
		var out, errs bytes.Buffer
		require.Equal(t, want, run([]string{args}, &out, &errs))
		require.NotEmpty(t, out.String()+errs.String())
	}
	require.Equal(t, 2, run(nil, new(bytes.Buffer), new(bytes.Buffer)))
}
