package compilers_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// ordinaryWorker is set in the process of TestOrdinaryUser that is an ordinary user's: where the
// worker is.
const ordinaryWorker = "EPCACHED_TEST_ORDINARY_WORKER"

// An ordinary user's daemon confines its workers as root's does, with the means that the system
// gives to ordinary users.
func TestOrdinaryUser(t *testing.T) {
	if worker := os.Getenv(ordinaryWorker); worker != "" {
		asOrdinaryUser(t, worker)
		return
	}
	if os.Geteuid() != 0 {
		asOrdinaryUser(t, compilertest.Worker(t))
		return
	}
	const nobody = 65534
	r := compilertest.Runtime(t, "openvino-1.8.1")
	if err := (&compilers.Credential{UID: nobody, GID: nobody}).CanPass(r.ORTLibrary); err != nil {
		t.Skipf("NOT TESTED: the runtime is where other users do not come: %v", err)
	}
	base, err := os.MkdirTemp("/var/tmp", "epcached-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(base)) })
	require.NoError(t, os.Chown(base, nobody, nobody))
	for name, from := range map[string]string{"epcached-ort": compilertest.Worker(t),
		"test": "/proc/self/exe"} {
		program, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(base, name), program, 0o755))
	}
	runtimes, err := filepath.EvalSymlinks(os.Getenv(compilertest.RuntimesVariable))
	require.NoError(t, err)
	// With a niceness above that of workers, which an ordinary user may not lower.
	cmd := exec.CommandContext(t.Context(), "nice", "-n", "10", filepath.Join(base, "test"),
		"-test.v", "-test.run=^TestOrdinaryUser$")
	cmd.Env = []string{"TMPDIR=" + base, "PATH=" + os.Getenv("PATH"),
		compilertest.RuntimesVariable + "=" + runtimes,
		ordinaryWorker + "=" + filepath.Join(base, "epcached-ort")}
	cmd.Dir = base
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody,
		Gid: nobody}}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Logf("%s", out)
}

func asOrdinaryUser(t *testing.T, worker string) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	c := compilers.NewORT(compilers.ORTOptions{Worker: worker,
		Limits: compilers.Limits{Processes: 300}})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	job := writeJob(t, r, compilers.EP{Name: openVINO, Options: f32}, compilertest.Dense(1, 32, 1))
	result, err := c.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	check, err := c.Check(t.Context(),
		compilers.CheckJob{Runtime: r, EPs: job.EPs,
			Graph: filepath.Join(job.Dir, result.Graph)})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome, check.Text)
	measures, err := c.Sandbox(t.Context())
	require.NoError(t, err)
	namespace := false
	for _, m := range measures {
		t.Log(m)
		namespace = namespace || m.Name == "processes" && m.InForce
	}
	require.Contains(t, fmt.Sprint(measures), fmt.Sprintf("uid %d", os.Geteuid()))
	if !namespace {
		t.Log("NOT TESTED: ordinary users may not make namespaces here")
		return
	}
	require.Contains(t, fmt.Sprint(measures), "user namespace")
	require.Contains(t, fmt.Sprint(measures), "process limit: 300")
	job = writeJob(t,
		hostileRuntime(t,
			`for (int i = 0; i < 500; i++) { int pid = fork(); if (pid < 0) { perror("fork"); `+
				`abort(); } if (!pid) { setsid(); pause(); } }`),
		compilers.EP{Name: qnn}, tinymodel.Relu())
	_, err = c.Compile(t.Context(), job, nil)
	require.ErrorContains(t, err, "aborted")
	require.ErrorContains(t, err, "Resource temporarily unavailable")
}
