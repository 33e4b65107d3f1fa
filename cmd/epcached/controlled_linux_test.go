package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A controlled daemon is this test binary, which runs the daemon's own main function and beside it a goroutine that sleeps and wakes. By how much
// that comes late is what waiting for a processor costs in that very process, and nothing of the store is in it: without it nobody could
// tell a wait for the collector from a busy machine. With the race detector in the tests the daemon has it too.
const controlledEnvironment = "EPCACHED_TEST_CONTROLLED"

// profilesEnvironment is a folder to leave profiles of the controlled daemon's waits in.
const profilesEnvironment = "EPCACHED_STRESS_PROFILES"

// controlEvery is how long the control sleeps.
const controlEvery = time.Millisecond

// controlled is the main function of such a process.
func controlled() int {
	dir := os.Getenv(profilesEnvironment)
	if dir != "" {
		runtime.SetBlockProfileRate(int(10 * time.Microsecond))
		runtime.SetMutexProfileFraction(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	late := make(chan time.Duration, 1)
	over, end := context.WithCancel(context.Background())
	go func() { late <- latest(over) }()
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	end()
	fmt.Fprintf(os.Stderr, "control: %.3f ms\n", float64((<-late).Microseconds())/1000)
	for _, name := range []string{"block", "mutex"} {
		if err := leaveProfile(dir, name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return exitFailure
		}
	}
	return code
}

// latest sleeps again and again, and gives the longest by which it woke too late.
func latest(ctx context.Context) (worst time.Duration) {
	for ctx.Err() == nil {
		began := time.Now()
		time.Sleep(controlEvery)
		worst = max(worst, time.Since(began)-controlEvery)
	}
	return worst
}

func leaveProfile(dir, name string) error {
	if dir == "" {
		return nil
	}
	f, err := os.Create(filepath.Join(dir, name+".pprof"))
	if err != nil {
		return err
	}
	if err := pprof.Lookup(name).WriteTo(f, 0); err != nil {
		return err
	}
	return f.Close()
}

// startControlled starts a controlled daemon, and waits until it answers.
func (s *site) startControlled(t testing.TB) *epcached {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	d := &epcached{TB: t, site: s, cmd: s.command(t), log: &syncBuffer{}, done: make(chan struct{})}
	d.cmd.Path, d.cmd.Args[0] = self, self
	d.cmd.Env = append(d.cmd.Env, controlledEnvironment+"=1")
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	d.run(t)
	d.dial().Close()
	return d
}

// control gives what the daemon, which has ended, has said of the longest that anything in it waited for a processor, in milliseconds.
func (d *epcached) control() float64 {
	d.Helper()
	m := regexp.MustCompile(`(?m)^control: ([0-9.]+) ms$`).FindStringSubmatch(d.log.String())
	require.NotNil(d, m, "no control in the log:\n%s", d.log)
	ms, err := strconv.ParseFloat(m[1], 64)
	require.NoError(d, err)
	return ms
}
