package compilers_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/compilers/workerproto"
)

// Work that no client waits for has the lowest priority everywhere: as a process, at the disk, and
// as a session.
func TestIdleWorkerHasTheLowestPriority(t *testing.T) {
	pid := preparedWorker(t, 0, workerproto.Preparation{Nice: 19, Idle: true})
	require.Equal(t, 19, niceness(t, pid))
	class, _, errno := unix.Syscall(unix.SYS_IOPRIO_GET, 1, uintptr(pid), 0)
	require.Zero(t, errno)
	require.EqualValues(t, 3, class>>13, "the idle class")
	requireSessionNiceness(t, 19, pid)
}

// requireSessionNiceness requires the niceness of a session, where the kernel has one.
func requireSessionNiceness(t *testing.T, want, pid int) {
	t.Helper()
	if group, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid),
		"autogroup")); err == nil && len(group) > 0 {
		require.Contains(t, string(group), fmt.Sprintf("nice %d\n", want))
	}
}

// A worker of a daemon with a low priority does not get a higher one, and starts. Its session has
// that priority, too.
func TestWorkerKeepsAHigherNiceness(t *testing.T) {
	own := niceness(t, os.Getpid())
	for _, more := range []int{0, 10} {
		want := min(max(5, own+more), 19)
		pid := preparedWorker(t, more, workerproto.Preparation{Nice: 5})
		require.Equal(t, want, niceness(t, pid))
		requireSessionNiceness(t, want, pid)
	}
}

// A daemon's threads have short time slices, which its workers do not inherit.
func TestWorkerHasTheUsualSlices(t *testing.T) {
	runtime.LockOSThread() // and never unlocked: the thread ends with its slice
	attr, err := unix.SchedGetAttr(0, 0)
	require.NoError(t, err)
	usual := attr.Runtime
	attr.Runtime = uint64(100 * time.Microsecond)
	require.NoError(t, unix.SchedSetAttr(0, attr, 0))
	if attr, err = unix.SchedGetAttr(0, 0); err != nil || attr.Runtime == usual {
		t.Skip("SKIPPED: this kernel has no slices of a thread's own; Linux 6.12 does")
	}
	attr, err = unix.SchedGetAttr(preparedWorker(t, 0, workerproto.Preparation{}), 0)
	require.NoError(t, err)
	require.Equal(t, usual, attr.Runtime)
}

// preparedWorker returns a worker process that was started with more niceness, and waits for its
// request.
func preparedWorker(t *testing.T, more int, p workerproto.Preparation) (pid int) {
	t.Helper()
	preparation, err := json.Marshal(p)
	require.NoError(t, err)
	request, keep, err := os.Pipe() // no request comes: the worker waits for it
	require.NoError(t, err)
	defer request.Close()
	answers, answer, err := os.Pipe()
	require.NoError(t, err)
	defer answer.Close()
	cmd := exec.Command("nice", "-n", strconv.Itoa(more), compilertest.Worker(t), "prepare",
		string(preparation))
	cmd.ExtraFiles = []*os.File{request, answer}
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		require.NoError(t, keep.Close())
		require.Error(t, cmd.Wait(), "a worker without a request fails")
		answers.Close()
	})
	require.Eventually(t, func() bool {
		found := childrenOf(cmd.Process.Pid)
		if len(found) != 1 {
			return false
		}
		pid = found[0]
		line, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
		return err == nil && strings.Contains(string(line), "\x00work")
	}, time.Minute, time.Millisecond)
	return pid
}

func niceness(t *testing.T, pid int) int {
	t.Helper()
	left, err := unix.Getpriority(unix.PRIO_PROCESS, pid)
	require.NoError(t, err)
	return 20 - left // the system call returns that
}

// childrenOf lists the processes that a process started.
func childrenOf(pid int) []int {
	var found []int
	// only a malformed pattern fails
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, path := range tasks {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		for _, word := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(word); err == nil {
				found = append(found, child)
			}
		}
	}
	return found
}

// A worker that is idle, and is wanted after all, rises.
func TestIdleWorkerRises(t *testing.T) {
	if _, err := exec.LookPath("ionice"); err != nil {
		t.Skip("NOT TESTED: there is no ionice")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	started := filepath.Join(t.TempDir(), "started")
	script := "ionice -c 3 -p $$; touch " + started +
		"; while ionice -p $$ | grep -q idle; do :; done; " + success
	job := writeJob(t, fakeRuntime(), compilers.EP{Name: openVINO}, tinymodel.Relu())
	urgent := make(chan struct{})
	job.Idle = urgent
	c := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, script)})
	type outcome struct {
		result compilers.Result
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		result, err := c.Compile(ctx, job, nil)
		done <- outcome{result, err}
	}()
	require.Eventually(t, func() bool { _, err := os.Stat(started); return err == nil },
		time.Minute, time.Millisecond)
	close(urgent)
	got := <-done
	require.ErrorIs(t, got.err, compilers.ErrOutput, "it ended by itself, and left no graph")
	require.Positive(t, got.result.CPUSeconds, "the time is reported though it failed")
}

// A source model loads as a compiled one does, and how long that takes is reported.
func TestSourceLoads(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	c := newORT(t, compilers.ORTOptions{})
	job := writeJob(t, r, compilers.EP{Name: openVINO}, compilertest.Dense(1, 64, 1))
	idle := make(chan struct{})
	checked, err := c.Check(t.Context(), compilers.CheckJob{Runtime: r, EPs: job.EPs,
		Graph: job.Model, Session: compilers.Session{GraphOptimizationLevel: "all"},
		Pace: compilers.Pace{Idle: idle}})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, checked.Outcome, checked.Text)
	require.Positive(t, checked.Seconds)
	require.Positive(t, checked.CPUSeconds)
}

// The gain of a build is judged by what both loads take of the processor, because on a machine that
// does other work both take many times as long by the clock: which of the two is less stays the
// same.
func TestComparedLoadsDoNotDependOnOtherWork(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	c := newORT(t, compilers.ORTOptions{})
	job := writeJob(t, r, compilers.EP{Name: openVINO}, compilertest.Dense(64, 256, 1))
	made, err := c.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	ctx, end := context.WithCancel(t.Context())
	defer end()
	for range 2 * runtime.NumCPU() {
		spin := exec.CommandContext(ctx, "/bin/sh", "-c", "while :; do :; done")
		require.NoError(t, spin.Start())
		t.Cleanup(func() { _ = spin.Wait() })
	}
	checked, err := c.Check(t.Context(), compilers.CheckJob{Runtime: r, EPs: job.EPs,
		Graph: filepath.Join(job.Dir, made.Graph), Against: job.Model,
		Session: compilers.Session{GraphOptimizationLevel: "all"}})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, checked.Outcome, checked.Text)
	require.Positive(t, checked.LoadCPU)
	require.Greater(t, checked.AgainstCPU, checked.LoadCPU,
		"the source model is compiled when it is loaded")
}
