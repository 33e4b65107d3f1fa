package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/unixsock"
)

// descriptors counts the daemon's open files.
func (d *epcached) descriptors() int { return len(d.openFiles()) }

// openFiles lists the daemon's open files as the kernel names them.
func (d *epcached) openFiles() (names []string) {
	dir := fmt.Sprintf("/proc/%d/fd", d.pid())
	entries, err := os.ReadDir(dir)
	require.NoError(d, err)
	for _, e := range entries {
		name, _ := os.Readlink(filepath.Join(dir, e.Name())) // it may have been closed just now
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// requireDescriptors waits until the daemon has at most so many files open.
func (d *epcached) requireDescriptors(most int) {
	d.Helper()
	require.EventuallyWithT(d, func(c *assert.CollectT) {
		open := d.openFiles()
		assert.LessOrEqual(c, len(open), most, "%v", open)
	}, patience, pollEvery, "the descriptors are given back")
}

// anonymous returns the daemon's own memory in kilobytes.
func (d *epcached) anonymous() int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.pid()))
	require.NoError(d, err)
	for _, line := range strings.Split(string(text), "\n") {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kb, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(rest), " kB"))
			require.NoError(d, err)
			return kb
		}
	}
	require.Fail(d, "no RssAnon")
	return 0
}

// goroutines ends the daemon, and counts what was running in it.
func (d *epcached) goroutines() int {
	require.NoError(d, d.cmd.Process.Signal(syscall.SIGQUIT))
	d.wait()
	var exit *exec.ExitError
	require.ErrorAs(d, d.err, &exit)
	return bytes.Count([]byte(d.log.String()), []byte("\ngoroutine "))
}

// Hundreds of applications connect, get hits, and leave, some amid a frame; the daemon keeps
// nothing.
func TestManyClientsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	model := writeModel(t, t.TempDir(), 1)
	idle := s.start(t)
	get(t, idle.dial(), model).view.Close()
	idle.dial().Close()
	calm := idle.goroutines()

	d := s.start(t)
	c := d.dial()
	get(t, c, model, onMissFail).view.Close()
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return d.status().Connections == 1 }, patience, pollEvery)
	before := d.descriptors()
	var memory [2]int
	for round := range memory {
		var group errgroup.Group
		for i := range 200 {
			group.Go(func() error { return d.visit(t, model, i) })
		}
		require.NoError(t, group.Wait())
		require.Eventually(t, func() bool { return d.status().Connections == 1 }, patience,
			pollEvery)
		d.requireDescriptors(before)
		memory[round] = d.anonymous()
	}
	require.Less(t, memory[1], memory[0]+16<<10, "memory after each round: %v kB", memory)
	require.Less(t, memory[1], 100<<10, "memory after each round: %v kB", memory)
	require.LessOrEqual(t, d.goroutines(), calm+2, "goroutines")
}

// visit is one application of many. Some leave in the middle.
func (d *epcached) visit(t *testing.T, model string, number int) error {
	if number%10 == 0 { // says half a word and goes
		conn, err := net.Dial("unix", d.socket)
		if err != nil {
			return err
		}
		_, err = conn.Write([]byte{200, 0, 0, 0, 1, 2, 3})
		return errors.Join(err, conn.Close())
	}
	c, err := unixsock.Dialer{Wait: patience, HelloTimeout: patience}.Dial(limited(t), d.socket)
	if err != nil {
		return err
	}
	defer c.Close()
	f, err := os.Open(model)
	if err != nil {
		return err
	}
	defer f.Close()
	for i := range 20 {
		if number%10 == 1 && i == 10 { // asks, and does not wait for the answer
			ctx, leave := context.WithCancel(limited(t))
			leave()
			_, view, err := c.Acquire(ctx, forModel(model), []*os.File{f}, nil, nil)
			if errors.Is(err, context.Canceled) {
				return nil
			}
			return errors.Join(err, view.Close()) // the answer was faster
		}
		reply, view, err := c.Acquire(limited(t), forModel(model), []*os.File{f}, nil, nil)
		if err != nil {
			return err
		}
		err = lease{reply, view}.wrong()
		if err := errors.Join(err, view.Close()); err != nil {
			return err
		}
		if reply.Outcome != "hit" {
			return fmt.Errorf("outcome %q", reply.Outcome)
		}
	}
	return nil
}

// On a busy machine a hit does not wait until other programs' slices end.
func TestThreadsHaveShortSlices(t *testing.T) {
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	get(t, d.dial(), writeModel(t, t.TempDir(), 1)).view.Close()
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", d.pid()))
	require.NoError(t, err)
	require.Greater(t, len(threads), 2)
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		require.NoError(t, err)
		attr, err := unix.SchedGetAttr(id, 0)
		if err == unix.ESRCH {
			continue // it has ended
		}
		require.NoError(t, err)
		if attr.Runtime == 0 {
			t.Skip("SKIPPED: this kernel has no slices of a thread's own; Linux 6.12 does")
		}
		require.EqualValues(t, 100*time.Microsecond, attr.Runtime)
	}
}
