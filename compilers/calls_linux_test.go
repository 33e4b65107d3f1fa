package compilers_test

import (
	"bytes"
	"flag"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// Workers of real EPs make the known system calls only. A job that fails because of another call is
// given it, and a warning says so.
func TestCallsThatAreNotKnown(t *testing.T) {
	requireInEffect(t, "privileges")
	compiler, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("NOT TESTED: no C compiler to build a library with")
	}
	// It is in every process from its start, as the EP's later versions might need it.
	build := func(body string) string {
		dir := t.TempDir()
		source, library := filepath.Join(dir, "calls.c"), filepath.Join(dir, "calls.so")
		require.NoError(t,
			os.WriteFile(source,
				[]byte(hostileHead+"__attribute__((constructor)) static void calls(void) {\n"+body+
					"\n}\n"), 0o600))
		out, err := exec.Command(compiler, "-shared", "-fPIC", "-o", library, source).
			CombinedOutput()
		require.NoError(t, err, "%s", out)
		return library
	}
	r := compilertest.Runtime(t, "openvino-1.8.1")
	compile := func(t *testing.T, body string, times int) (log string) {
		var logged bytes.Buffer
		library := build(body)
		c := newORT(t,
			compilers.ORTOptions{Log: slog.New(slog.NewTextHandler(&logged, nil)),
				Env:     []string{"LD_PRELOAD=" + library},
				Sandbox: compilers.SandboxOptions{Read: []string{filepath.Dir(library)}}})
		for range times {
			job := writeJob(t, r, compilers.EP{Name: openVINO}, compilertest.Dense(1, 32, 1))
			result, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err, logged.String())
			require.Equal(t, job.Output, result.Graph)
			log += result.Log
		}
		return log + logged.String()
	}
	log := compile(t, `
		tell("kcmp", syscall(SYS_kcmp, getpid(), getpid(), 0, 0, 0));
		tell("late", syscall(449, 0, 0, 0, 0, 0)); // futex_waitv, of Linux 5.16
		tell("umask", umask(077));`, 1)
	require.Contains(t, log, "kcmp=Operation not permitted")
	require.Contains(t, log, "late=Function not implemented")
	require.Contains(t, log, "umask=DONE")
	require.Contains(t, log, "refused the unknown system call 449\n")
	require.NotContains(t, log, "level=WARN", "it goes on without")

	log = compile(t, `if (syscall(SYS_kcmp, getpid(), getpid(), 0, 0, 0) < 0) abort();`, 2)
	require.Equal(t, 1, strings.Count(log, "level=WARN"), "%s", log)
	require.Contains(t, log, "is retried without the filter")
}

var allRuntimes = flag.Bool("compilers.all", false, "compile with all runtimes that are here")

// None of the real EPs is refused a call: a few versions in an ordinary run, and all that are here
// in make test-long.
func TestRealEPsMakeKnownCallsOnly(t *testing.T) {
	root := os.Getenv(compilertest.RuntimesVariable)
	entries, err := os.ReadDir(root)
	if err != nil || len(entries) == 0 {
		t.Skipf("NOT TESTED WITH A REAL EP: no runtimes in %q: %v", root, err)
	}
	c := newORT(t, compilers.ORTOptions{})
	for _, e := range entries {
		r, err := compilers.Find(filepath.Join(root, e.Name()))
		if err != nil || len(r.EPs) == 0 || !*allRuntimes &&
			!slices.Contains([]string{"openvino-1.4.0", "openvino-1.8.1-ort-1.32.0", "qnn-2.7.0"},
				e.Name()) {
			continue
		}
		t.Run(e.Name(), func(t *testing.T) {
			ep := compilers.EP{Name: r.EPs[0].EP}
			job := writeJob(t, r, ep, compilertest.Dense(1, 32, 1))
			result, err := c.Compile(t.Context(), job, nil)
			require.NotContains(t, result.Log, "unknown system call")
			if err != nil && strings.Contains(err.Error(), "is not available in this build") {
				return // these versions of ONNX Runtime and the EP do not fit
			}
			require.NoError(t, err)
			check, err := c.Check(t.Context(),
				compilers.CheckJob{Runtime: r, EPs: job.EPs,
					Graph: filepath.Join(job.Dir, result.Graph)})
			require.NoError(t, err)
			require.NotEqual(t, compilers.Failed, check.Outcome, check.Text)
			require.NotContains(t, check.Text, "unknown system call")
		})
	}
}
