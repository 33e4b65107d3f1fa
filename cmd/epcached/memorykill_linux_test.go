package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// bounded makes a cgroup below this process's own, and returns a command that runs another one in
// it.
func bounded(t testing.TB, bytes int) (under []string) {
	list, err := os.ReadFile("/proc/self/cgroup")
	require.NoError(t, err)
	dir, file := "", "memory.limit_in_bytes"
	for line := range strings.Lines(string(list)) {
		switch parts := strings.SplitN(strings.TrimSpace(line), ":", 3); {
		case parts[1] == "memory":
			dir = filepath.Join("/sys/fs/cgroup/memory", parts[2])
		case parts[1] == "" && dir == "":
			dir, file = filepath.Join("/sys/fs/cgroup", parts[2]), "memory.max"
		}
	}
	dir = filepath.Join(dir, fmt.Sprintf("epcached-test-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip("SKIPPED: only root can make cgroups: ", err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) }) // it fails if a process is left
	if err := os.WriteFile(filepath.Join(dir, file), fmt.Append(nil, bytes), 0o644); err != nil {
		t.Skip("SKIPPED: no memory controller: ", err)
	}
	return []string{"sh", "-ec", "echo $$ > " + dir + `/cgroup.procs; exec "$@"`, "sh"}
}

// A container's limit is what workers are bounded by, and a worker or daemon that the kernel kills
// for memory is said to be.
func TestAContainersMemoryLimitIsNamed(t *testing.T) {
	s := newSite(t, runtimeDir(t, openVINO))
	s.under = bounded(t, 512<<20)
	d := s.start(t)
	out, _ := s.ctl(t, "doctor", "--json")
	require.Contains(t, out, "384.0 MiB for all processes of a worker")

	hog := exec.CommandContext(limited(t), s.under[0], append(s.under[1:], "tail", "/dev/zero")...)
	require.Error(t, hog.Run(), "it reads a line without an end into memory")
	require.True(t, d.running())
	require.Empty(t, d.status().GetWarnings())
	d.stop()
	d = s.start(t)
	require.Empty(t, d.status().GetWarnings(), "it was stopped")

	hog = exec.CommandContext(limited(t), s.under[0], append(s.under[1:], "tail", "/dev/zero")...)
	require.Error(t, hog.Run())
	d.kill()
	d = s.start(t)
	require.Len(t, d.status().GetWarnings(), 1)
	require.Contains(t, d.status().GetWarnings()[0], "the kernel has killed processes of this "+
		"container for memory (1); 512.0 MiB are all that it has")
	out, _ = s.ctl(t, "doctor", "--json")
	require.Contains(t, out, "jobs_memory_bytes and [limits]")
}

// The kernel kills the worker first, and the failure names the cause.
func TestAWorkerThatIsKilledForMemorySaysSo(t *testing.T) {
	s := newSite(t, runtimeDir(t, "qnn-2.7.0"))
	s.under = bounded(t, 128<<20)
	s.start(t)
	out, status := s.ctl(t, "get", modelOf(t, "minilm-fp32"), "--ep", "QNNExecutionProvider",
		"--option", "soc_model=60", "--dim", "batch_size=1", "--dim", "sequence_length=128")
	require.NotZero(t, status, out)
	require.Contains(t, out, "memory limit reached: killed by the kernel, because 128.0 MiB "+
		"are all that this machine or container has")
}
