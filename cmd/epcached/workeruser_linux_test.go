package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// A directory that would make each compile fail later is reported at the start.
func TestWorkerUserThatCannotWork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can start processes of another user")
	}
	open, err := os.MkdirTemp("/var/tmp", "epcached-test-")
	require.NoError(t, err)
	t.Cleanup(func() { removeAll(t, open) })
	require.NoError(t, os.Chmod(open, 0o711))
	closed := filepath.Join(open, "closed")
	require.NoError(t, os.Mkdir(closed, 0o700))
	worker := filepath.Join(open, "epcached-ort")
	require.NoError(t, os.WriteFile(worker, nil, 0o755))
	private := filepath.Join(open, "private-ort")
	require.NoError(t, os.WriteFile(private, nil, 0o700))
	for name, c := range map[string]struct {
		s      config.Settings
		worker string
		says   string
	}{
		"state": {config.Settings{State: filepath.Join(closed, "state")}, worker,
			`cannot pass "` + closed + `"`},
		"runtime": {config.Settings{State: open,
			Runtimes: []config.Runtime{{ORTLibrary: filepath.Join(closed, "lib.so")}}}, worker,
			`cannot pass "` + closed + `"`},
		"program":    {config.Settings{State: open}, private, "cannot run"},
		"root group": {config.Settings{State: open, WorkerUser: "65534:0"}, worker, "root's group"},
		"nobody": {config.Settings{State: open, WorkerUser: "no-such-user"}, worker,
			"unknown user"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.s.WorkerUser == "" {
				c.s.WorkerUser = "65534:65534"
			}
			_, err := workerUser(&c.s, c.worker)
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, "worker_user")
		})
	}
	user, err := workerUser(&config.Settings{State: open, WorkerUser: "65534:65534"}, worker)
	require.NoError(t, err)
	require.EqualValues(t, 65534, user.UID)
}

// A daemon of root compiles as another user, serves what came of it, and reports what keeps that
// user from doing harm.
func TestDaemonWithWorkersOfAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can start processes of another user")
	}
	runtime := runtimeDir(t, openVINO)
	user := &compilers.Credential{UID: 65534, GID: 65534}
	if err := user.CanPass(filepath.Join(runtime, "x")); err != nil {
		t.Skipf("SKIPPED: the runtime is where other users do not come: %v", err)
	}
	open, err := os.MkdirTemp("/var/tmp", "epcached-test-")
	require.NoError(t, err)
	t.Cleanup(func() { removeAll(t, open) })
	require.NoError(t, os.Chmod(open, 0o711))
	worker := filepath.Join(open, "epcached-ort")
	copyPrograms(t, open, "epcached-ort")
	s := newSite(t, runtime)
	s.state = filepath.Join(open, "state")
	s.config = "worker = \"" + worker + "\"\nworker_user = \"65534:65534\"\n"
	d := s.start(t)
	c := d.dial()
	path := filepath.Join(shortDir(t), "m.onnx")
	require.NoError(t, os.WriteFile(path, compilertest.Dense(1, 64, 1), 0o600))
	require.Equal(t, "compiled", get(t, c, path).Outcome)
	require.Equal(t, "hit", get(t, c, path).Outcome)
	reply, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	require.Contains(t, reply.Sandbox, "user: workers run as uid 65534")
}
