package compilers

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What is written and read, in a plain folder: many systems that run tests give nobody the controllers.
func TestCgroupHasTheLimits(t *testing.T) {
	limits := Limits{Memory: 5 << 30, Processes: 77}
	for name, c := range map[string]struct {
		memory, pids bool
		files        map[string]string
	}{
		"memory and pids": {true, true, map[string]string{"memory.max": "5368709120", "memory.oom.group": "1", "memory.swap.max": "0", "pids.max": "77"}},
		"pids":            {false, true, map[string]string{"pids.max": "77"}},
		"none":            {false, false, map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			groups := &cgroups{folder: t.TempDir(), memory: c.memory, pids: c.pids}
			g, err := groups.limited(limits)
			require.NoError(t, err)
			have := map[string]string{}
			entries, err := os.ReadDir(g.path)
			require.NoError(t, err)
			for _, e := range entries {
				text, err := os.ReadFile(filepath.Join(g.path, e.Name()))
				require.NoError(t, err)
				have[e.Name()] = string(text)
			}
			require.Equal(t, c.files, have)
			require.NoError(t, os.WriteFile(filepath.Join(g.path, "cpu.stat"), []byte("usage_usec 2500000\nuser_usec 1\n"), 0o600))
			require.NoError(t, os.WriteFile(filepath.Join(g.path, "memory.events"), []byte("oom 3\noom_kill 1\n"), 0o600))
			require.Equal(t, usage{cpu: 2500 * time.Millisecond, outOfMemory: true}, g.end())
			second, err := groups.limited(limits)
			require.NoError(t, err)
			require.NotEqual(t, g.path, second.path)
			require.Zero(t, second.end())
		})
	}
}

// The kernel's kill for the memory limit is told as that, not as a crash.
func TestOutOfMemoryHasItsName(t *testing.T) {
	w := &worker{cmd: exec.Command("sh", "-c", "kill -KILL $$"), stderr: &Tail{Limit: 10}, eventErr: os.ErrClosed}
	require.Error(t, w.cmd.Run())
	_, err := w.result(t.Context(), "X", Limits{Memory: 123}, usage{outOfMemory: true})
	require.ErrorIs(t, err, ErrMemory)
	require.ErrorContains(t, err, "memory limit reached: 123 B")
	_, err = w.result(t.Context(), "X", Limits{Memory: 123}, usage{})
	var exit *ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, "killed", exit.Signal)
}

// Real cgroups, where this process may make some: all processes in one end with it, and it is removed.
func TestCgroupEnds(t *testing.T) {
	own, err := ownCgroup()
	if err != nil || delegated(own) == "" {
		t.Skipf("NOT TESTED: no cgroup is this process's to use: %q, %v", own, err)
	}
	groups := &cgroups{folder: own}
	g, err := groups.make(Limits{})
	if err != nil {
		t.Skipf("NOT TESTED: cgroups cannot be made here: %v", err)
	}
	cmd := exec.Command("setsid", "sleep", "60")
	require.NoError(t, cmd.Start())
	require.NoError(t, os.WriteFile(filepath.Join(g.path, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0))
	g.end()
	require.Error(t, cmd.Wait(), "it was killed")
	require.NoDirExists(t, g.path)
}

// What a daemon left that was killed is removed by the next.
func TestOldCgroupsAreRemoved(t *testing.T) {
	folder := t.TempDir()
	gone := exec.Command("true")
	require.NoError(t, gone.Run())
	old := filepath.Join(folder, ownName+strconv.Itoa(gone.Process.Pid)+"-1")
	mine := filepath.Join(folder, ownName+strconv.Itoa(os.Getpid())+"-1")
	other := filepath.Join(folder, "another-1-1")
	for _, path := range []string{old, mine, other} {
		require.NoError(t, os.Mkdir(path, 0o700))
	}
	removeOld(folder)
	require.NoDirExists(t, old)
	require.DirExists(t, mine)
	require.DirExists(t, other)
}
