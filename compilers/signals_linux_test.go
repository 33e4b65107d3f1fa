package compilers_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// A signal may hit the worker, or the process that looks after it. Neither may answer with a dump
// of Go's runtime, whose last line is a register.
func TestDeathBySignalIsReportedByName(t *testing.T) {
	for _, signal := range []unix.Signal{unix.SIGSEGV, unix.SIGABRT, unix.SIGBUS, unix.SIGQUIT,
		unix.SIGSTKFLT} {
		name := unix.SignalName(signal)
		for _, words := range []string{"", "the EP's last words"} {
			for _, supervisor := range []bool{false, true} {
				err := killedInVendorCode(t, signal, supervisor, words)
				var exit *compilers.ExitError
				require.ErrorAs(t, err, &exit, name)
				require.Equal(t, name, exit.Name)
				want := " (" + name + "): " + signal.String() + " while registering"
				if words != "" {
					want += ": " + words
				}
				require.True(t, strings.HasSuffix(err.Error(), want), err.Error())
			}
		}
	}
}

// killedInVendorCode compiles with an EP that prints words and blocks. Then it sends the signal to
// the worker, or to the process that looks after it, and returns the compile's error.
func killedInVendorCode(t *testing.T, signal unix.Signal, supervisor bool, words string) error {
	t.Helper()
	c := newORT(t, compilers.ORTOptions{Sandbox: compilers.SandboxOptions{NoNamespaces: true}})
	body := `fputs("` + words + `", stderr); creat("here", 0600); for (;;) pause();`
	job := writeJob(t, hostileRuntime(t, body), compilers.EP{Name: qnn}, tinymodel.Relu())
	here := filepath.Join(job.Dir, ".worker", "here")
	done := make(chan error, 1)
	go func() {
		_, err := c.Compile(t.Context(), job, nil)
		done <- err
	}()
	require.Eventually(t, func() bool { _, err := os.Stat(here); return err == nil }, time.Minute,
		time.Millisecond)
	for _, pid := range childrenOf(os.Getpid()) {
		if dir, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid),
			"cwd")); err != nil || dir != filepath.Dir(here) {
			continue
		}
		if !supervisor {
			pid = childrenOf(pid)[0]
		}
		require.NoError(t, unix.Kill(pid, signal))
	}
	return <-done
}
