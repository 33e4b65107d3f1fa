package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A controlled daemon is this test binary, which runs the daemon's own main function, and leaves
// profiles. With the race detector in the tests the daemon has it too.
const controlledEnvironment = "EPCACHED_TEST_CONTROLLED"

// profilesEnvironment is a directory to leave profiles of the controlled daemon's waits in.
const profilesEnvironment = "EPCACHED_STRESS_PROFILES"

// controlled is the main function of such a process.
func controlled() int {
	dir := os.Getenv(profilesEnvironment)
	if dir != "" {
		runtime.SetBlockProfileRate(int(10 * time.Microsecond))
		runtime.SetMutexProfileFraction(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	for _, name := range []string{"block", "mutex"} {
		if err := leaveProfile(dir, name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return exitFailure
		}
	}
	return code
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
