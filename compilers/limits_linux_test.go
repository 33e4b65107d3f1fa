package compilers_test

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/stretchr/testify/require"
)

// The worker puts its limits on itself; a small one of each kind must stop a real compile, with an
// error that is no timeout.
func TestLimitsStopARealCompile(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	for name, limits := range map[string]compilers.Limits{
		"memory":     {Memory: 150 << 20},
		"file size":  {Output: 64 << 10},
		"open files": {OpenFiles: 8},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := newORT(t, compilers.ORTOptions{Limits: limits}).
				Compile(t.Context(),
					writeJob(t, r, compilers.EP{Name: openVINO}, compilertest.Dense(1, 2048, 1)),
					nil)
			require.Error(t, err)
			require.NotErrorIs(t, err, compilers.ErrTimeout)
			t.Log(err)
		})
	}
}

// A daemon that runs as root starts workers as another user, which can read the job's files and
// none of the daemon's.
func TestWorkerOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can start processes of another user")
	}
	const nobody = 65534
	r := compilertest.Runtime(t, "openvino-1.8.1")
	// a directory of t.TempDir has parents that only root passes
	base, err := os.MkdirTemp("/var/tmp", "epcached-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(base)) })
	require.NoError(t, os.Chmod(base, 0o711))
	worker := filepath.Join(base, "epcached-ort")
	program, err := os.ReadFile(compilertest.Worker(t))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(worker, program, 0o755))
	dir := filepath.Join(base, "staging", "job", "out")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	model := filepath.Join(base, "staging", "job", "m.onnx")
	require.NoError(t, os.WriteFile(model, compilertest.Dense(1, 32, 1), 0o600))

	user := &compilers.Credential{UID: nobody, GID: nobody}
	if err := user.CanPass(r.ORTLibrary); err != nil {
		t.Skipf("NOT TESTED: the runtime is where other users do not come: %v", err)
	}
	c := compilers.NewORT(compilers.ORTOptions{Worker: worker, User: user,
		Scratch: filepath.Join(base, "staging")})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	job := compilers.Job{Runtime: r, EPs: []compilers.EP{{Name: openVINO}}, Model: model,
		Dir: dir, Output: "m_ctx.onnx"}
	result, err := c.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	for _, name := range append(result.Files, ".", "../m.onnx") {
		info, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Zero(t, info.Sys().(*syscall.Stat_t).Uid, "%s still belongs to the worker", name)
	}
	info, err := os.Stat(model)
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm(), "the model is the daemon's alone again")
	prints, err := c.Fingerprint(t.Context(), r, job.EPs, nil)
	require.NoError(t, err)
	require.NotEmpty(t, prints[0].SDKVersion)
	check, err := c.Check(t.Context(),
		compilers.CheckJob{Runtime: r, EPs: job.EPs, Graph: filepath.Join(dir, result.Graph)})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome, check.Text)

	compared, err := c.VerifyOutput(t.Context(), compilers.VerifyJob{Source: model, Most: 0.1,
		CheckJob: compilers.CheckJob{Runtime: r, EPs: job.EPs,
			Graph: filepath.Join(dir, result.Graph)}})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, compared.Outcome, compared.Text)

	// A vendor's own compiler is started like a worker.
	tool := filepath.Join(base, "tool")
	require.NoError(t,
		os.WriteFile(tool,
			[]byte("#!/bin/sh\ncat \"$1\" > \"$2\" && echo \"as $(id -u)\" >&2; exit 1\n"), 0o755))
	require.NoError(t,
		c.AddTools([]compilers.Tool{{EP: "ScriptExecutionProvider", Program: tool,
			Args: []string{"{model}", "{output}"}, Alone: true}}))
	attempt := job
	attempt.EPs, attempt.Dir = []compilers.EP{{Name: "ScriptExecutionProvider"}},
		filepath.Join(base, "staging", "job", "tool")
	require.NoError(t, os.Mkdir(attempt.Dir, 0o700))
	_, err = c.Compile(t.Context(), attempt, nil)
	require.ErrorContains(t, err, "run tool: exit status 1: as 65534")

	// A build in the store, where that user does not come.
	store := filepath.Join(base, "store")
	require.NoError(t, os.Rename(dir, store))
	require.NoError(t, os.Chown(store, 0, 0))
	require.NoError(t, os.Chmod(store, 0o700))
	for _, name := range result.Files {
		require.NoError(t, os.Chmod(filepath.Join(store, name), 0o444))
	}
	graph := filepath.Join(store, result.Graph)
	require.Error(t, user.CanPass(graph))
	check, err = c.Check(t.Context(), compilers.CheckJob{Runtime: r, EPs: job.EPs, Graph: graph})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome, check.Text)

	measures, err := c.Sandbox(t.Context())
	require.NoError(t, err)
	require.Contains(t, fmt.Sprint(measures), "workers run as uid 65534")
	require.Contains(t, fmt.Sprint(measures), "(of the workers' user)",
		"the kernel counts the processes of a user of their own")
}

// A user of the workers' own has no more processes than the limit.
func TestProcessesAreLimited(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can start processes of another user")
	}
	base, err := os.MkdirTemp("/var/tmp", "epcached-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(base)) })
	require.NoError(t, os.Chmod(base, 0o711))
	worker := filepath.Join(base, "epcached-ort")
	program, err := os.ReadFile(compilertest.Worker(t))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(worker, program, 0o755))
	r := hostileRuntime(t,
		`for (int i = 0; i < 500; i++) { int pid = fork(); if (pid < 0) { fprintf(stderr, `+
			`"at %d: %s\n", i, strerror(errno)); abort(); } if (!pid) pause(); }`)
	library := filepath.Join(base, "libonnxruntime_providers_qnn.so")
	require.NoError(t, os.Rename(r.EPs[0].Path, library))
	require.NoError(t, os.Chmod(library, 0o755))
	r.EPs[0].Path = library
	// the other user may not be able to reach the project's directory
	ort := filepath.Join(base, filepath.Base(r.ORTLibrary))
	bytes, err := os.ReadFile(r.ORTLibrary)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(ort, bytes, 0o755))
	r.ORTLibrary = ort
	const uid = 65533 // of no other process
	c := compilers.NewORT(compilers.ORTOptions{Worker: worker,
		User: &compilers.Credential{UID: uid, GID: uid}, Scratch: base,
		Limits: compilers.Limits{Processes: 60}})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	facts, err := c.Probe(t.Context(), r)
	require.NoError(t, err)
	require.Contains(t, facts.EPs[0].Error, "Resource temporarily unavailable")
}

// Workers of another user reach what a model has in directories below its own, and the source of a
// weightless build, and nothing stays open.
func TestWorkersOfAnotherUserReachTheSource(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can start processes of another user")
	}
	const nobody = 65534
	base, err := os.MkdirTemp("/var/tmp", "epcached-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(base)) })
	require.NoError(t, os.Chmod(base, 0o711))
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	r.ORTLibrary, r.EPs[0].Path = copied(t, r.ORTLibrary, base), copied(t, r.EPs[0].Path, base)
	r.EPs[0].Files = []string{r.EPs[0].Path}
	c := compilers.NewORT(compilers.ORTOptions{Worker: copied(t, compilertest.Worker(t), base),
		User:    &compilers.Credential{UID: nobody, GID: nobody},
		Scratch: filepath.Join(base, "staging")})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	job := compilers.Job{Runtime: r, EPs: []compilers.EP{testEP(nil)},
		Dir: filepath.Join(base, "staging", "job", "out"), Output: "m_ctx.onnx",
		Session: compilers.Session{SessionOptions: byReference}}
	require.NoError(t, os.MkdirAll(job.Dir, 0o700))
	source := filepath.Join(base, "staging", "job", "model")
	require.NoError(t, os.MkdirAll(filepath.Join(source, "w", "deep"), 0o700))
	m := externalized(t, filepath.Join(source, "w", "deep"), layers(1, 2, false))
	for i := range m.Initializers {
		m.Initializers[i].Location = "w/deep/m.data"
	}
	job.Model = write(t, source, "m.onnx", m)
	result, err := c.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	require.ElementsMatch(t,
		[]string{"m_ctx.onnx", "m_epcachedtest.bin", "m.onnx", "w/deep/m.data"}, result.Files)
	for path, mode := range map[string]os.FileMode{"w": 0o700, "w/deep": 0o700,
		"w/deep/m.data": 0o600, "m.onnx": 0o600} {
		info, err := os.Stat(filepath.Join(source, path))
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode().Perm(), path)
	}
	require.NoError(t, os.RemoveAll(source))
	check := func(dir string) {
		checked, err := c.Check(t.Context(),
			compilers.CheckJob{Runtime: r, EPs: job.EPs, Graph: filepath.Join(dir, result.Graph),
				Session: compilers.Session{SessionOptions: byReference}})
		require.NoError(t, err)
		require.Equal(t, compilers.Passed, checked.Outcome, checked.Text)
	}
	check(job.Dir)
	store := filepath.Join(base, "store") // where that user does not come
	require.NoError(t, os.Rename(job.Dir, store))
	require.NoError(t, os.Chown(store, 0, 0))
	require.NoError(t, os.Chmod(store, 0o700))
	check(store)
}
