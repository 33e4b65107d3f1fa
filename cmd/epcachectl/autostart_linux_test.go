package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// emptyHome is a user without a daemon, and with this program in PATH to start one.
func emptyHome(t *testing.T, program string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, name := range []string{"EPCACHE_SOCKET", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", autostartVariable} {
		t.Setenv(name, "")
	}
	t.Setenv("HOME", dir)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "epcached"), []byte("#!/bin/sh\n"+program), 0o755))
	t.Setenv("PATH", dir+":/usr/bin:/bin")
	return dir
}

// What is asked for needs a daemon, and looking whether there is one does not make one.
func TestDaemonIsStartedForWhoNeedsOne(t *testing.T) {
	const tells = `echo "$@" >> "$HOME/told"; echo "epcached: the disk is full" >&2; exit 1` + "\n"
	dir := emptyHome(t, tells)
	for _, verb := range []string{"status", "doctor"} {
		got := call(t, verb)
		require.Equal(t, exitNoDaemon, got.code, verb)
		require.NoFileExists(t, filepath.Join(dir, "told"), verb)
	}
	got := call(t, "list")
	require.Equal(t, exitNoDaemon, got.code)
	require.Contains(t, got.err, "hint: none can be started: the disk is full")
	told, err := os.ReadFile(filepath.Join(dir, "told"))
	require.NoError(t, err)
	require.Equal(t, "--autostart --socket "+filepath.Join(dir, ".local/state/epcached/epcached.sock")+"\n", string(told))
}

func TestDaemonIsNotStartedWhereNotWanted(t *testing.T) {
	cases := map[string]struct {
		variable, value string
		args            []string
	}{
		"switched off":    {autostartVariable, "0", []string{"list"}},
		"socket by name":  {"HOMELESS", "1", []string{"list", "--socket", "/nowhere/s", "--wait", "0s"}},
		"by the variable": {"EPCACHE_SOCKET", "/nowhere/s", []string{"list", "--wait", "0s"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := emptyHome(t, `touch "$HOME/told"`+"\n")
			t.Setenv(c.variable, c.value)
			got := call(t, c.args...)
			require.Equal(t, exitNoDaemon, got.code)
			require.NoFileExists(t, filepath.Join(dir, "told"))
		})
	}
}
