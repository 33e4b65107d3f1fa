package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

// emptyHome is a user without a daemon, and with this program in PATH to start one.
func emptyHome(t *testing.T, program string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, name := range []string{"EPCACHE_SOCKET", "XDG_RUNTIME_DIR", "XDG_STATE_HOME",
		daemon.AutostartVariable} {
		t.Setenv(name, "")
	}
	t.Setenv("HOME", dir)
	require.NoError(t,
		os.WriteFile(filepath.Join(dir, "epcached"), []byte("#!/bin/sh\n"+program), 0o755))
	t.Setenv("PATH", dir+":/usr/bin:/bin")
	return dir
}

// Verbs that need a daemon start one; status and doctor do not.
func TestDaemonIsStartedForVerbsThatNeedOne(t *testing.T) {
	const logs = `echo "$@" >> "$HOME/told"; echo "epcached: the disk is full" >&2; exit 1` + "\n"
	dir := emptyHome(t, logs)
	for verb, code := range map[string]int{"status": exit.NoDaemon, "doctor": exit.Done} {
		got := call(t, verb)
		require.Equal(t, code, got.code, verb)
		require.NoFileExists(t, filepath.Join(dir, "told"), verb)
	}
	require.Contains(t, call(t, "status").err,
		"hint: the next client starts a daemon")
	got := call(t, "list")
	require.Equal(t, exit.NoDaemon, got.code)
	require.Contains(t, got.err, "hint: none can be started: the disk is full")
	told, err := os.ReadFile(filepath.Join(dir, "told"))
	require.NoError(t, err)
	require.Equal(t, "--autostart --socket "+
		filepath.Join(dir, ".local/state/epcached/epcached.sock")+"\n", string(told))
}

func TestDaemonIsNotStartedWhereNotWanted(t *testing.T) {
	cases := map[string]struct {
		variable, value string
		args            []string
		hint            string
	}{
		"disabled": {daemon.AutostartVariable, "0", []string{"list"},
			"hint: start one with: epcached --runtime DIR, or name its socket"},
		"socket by name": {"HOMELESS", "1",
			[]string{"list", "--socket", "/nowhere/s", "--wait", "0s"},
			"hint: start one with: epcached --runtime DIR --socket /nowhere/s\n"},
		"by the variable": {"EPCACHE_SOCKET", "/nowhere/s", []string{"list", "--wait", "0s"},
			"hint: start one with: epcached --runtime DIR --socket /nowhere/s\n"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := emptyHome(t, `touch "$HOME/told"`+"\n")
			t.Setenv(c.variable, c.value)
			got := call(t, c.args...)
			require.Equal(t, exit.NoDaemon, got.code)
			require.Contains(t, got.err, c.hint)
			require.NoFileExists(t, filepath.Join(dir, "told"))
		})
	}
}

// EPCACHE_DAEMON may name anything.
func TestAProgramThatIsNoDaemonIsNamed(t *testing.T) {
	for program, says := range map[string]string{
		"/bin/false": "none can be started: /bin/false --autostart: exit status 1; " +
			"EPCACHE_DAEMON names the program",
		"/bin/true": "/bin/true --autostart reported success, but no daemon answers; " +
			"EPCACHE_DAEMON names " +
			"the program",
		"/no/such": "no such file or directory; EPCACHE_DAEMON names the program",
	} {
		emptyHome(t, "")
		t.Setenv(daemon.ProgramVariable, program)
		got := call(t, "list", "--wait", "0s")
		require.Equal(t, exit.NoDaemon, got.code)
		require.Contains(t, got.err, says)
		got = call(t, "doctor", "--wait", "0s")
		require.Contains(t, got.out, "problem  daemon: none runs, and none can be started: "+
			program)
	}
}

func TestDoctorSaysWhereNoDaemonCanBeStarted(t *testing.T) {
	says := func(want string) {
		t.Helper()
		got := call(t, "doctor")
		require.Equal(t, exit.NoDaemon, got.code)
		require.Contains(t, got.out, want)
	}
	home := emptyHome(t, "")
	got := call(t, "doctor")
	require.Equal(t, exit.Done, got.code)
	require.Contains(t, got.out,
		"ok       daemon: none runs; the next client starts one")

	config := filepath.Join(home, ".config", "epcached", "epcached.toml")
	t.Setenv("XDG_CONFIG_HOME", filepath.Join(home, ".config"))
	require.NoError(t, os.MkdirAll(filepath.Dir(config), 0o700))
	require.NoError(t, os.WriteFile(config, []byte("stat = \"/x\"\n"), 0o600))
	says("none can be started: " + config)
	require.NoError(t, os.WriteFile(config, []byte("state = \"/proc/none\"\n"), 0o600))
	says("none can be started: only 0 B are free for /proc/none")
	require.NoError(t, os.Remove(config))

	file := filepath.Join(home, ".local")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	says("none can be started: " + file + " is not a directory")

	require.NoError(t, os.Remove(file))
	state := filepath.Join(file, "state", "epcached")
	require.NoError(t, os.MkdirAll(state, 0o700))
	require.NoError(t, os.Chmod(state, 0o777))
	says("none can be started: other users may write to its state directory " + state)
	require.NoError(t, os.Chmod(state, 0o700))
	require.NoError(t, syscall.Mkfifo(filepath.Join(state, "lock"), 0o600))
	says("none can be started: " + filepath.Join(state, "lock") + " is not a regular file")
	require.NoError(t, os.RemoveAll(file))
	t.Setenv("HOME", filepath.Join(home, strings.Repeat("h", 120)))
	says("none can be started: the path in HOME is too long for a socket")
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the rest mounts a file system, which takes root")
	}
	small := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small).
		CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: no small file system can be mounted: %s", out)
	}
	defer func() { require.NoError(t, exec.Command("umount", small).Run()) }()
	t.Setenv("HOME", small)
	says("none can be started: only 1.0 MiB are free for " +
		filepath.Join(small, ".local", "state", "epcached"))
}
