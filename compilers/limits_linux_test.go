package compilers_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

// The worker puts its limits on itself; a small one of each kind must stop a real compile, with an error that is no timeout.
func TestLimitsStopARealCompile(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	for name, limits := range map[string]compilers.Limits{
		"memory":     {Memory: 150 << 20},
		"file size":  {Output: 64 << 10},
		"open files": {OpenFiles: 8},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := newORT(t, compilers.ORTOptions{Limits: limits}).
				Compile(t.Context(), writeJob(t, r, compilers.EP{Name: openVINO}, tinymodel.Dense(1, 2048, 1)), nil)
			require.Error(t, err)
			require.NotErrorIs(t, err, compilers.ErrTimeout)
			t.Log(err)
		})
	}
}

// A daemon that runs as root starts workers as somebody else, who sees the job's folder and nothing of the daemon's.
func TestWorkerOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start processes of another user")
	}
	const nobody = 65534
	r := compilertest.Runtime(t, "openvino-1.8.1")
	base, err := os.MkdirTemp("/var/tmp", "epcached-test-") // a folder of t.TempDir has parents that only root passes
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(base)) })
	require.NoError(t, os.Chmod(base, 0o711))
	worker := filepath.Join(base, "epcached-ort")
	program, err := os.ReadFile(compilertest.Worker(t))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(worker, program, 0o755))
	folder := filepath.Join(base, "job")
	require.NoError(t, os.Mkdir(folder, 0o700))
	model := filepath.Join(folder, "m.onnx")
	require.NoError(t, os.WriteFile(model, tinymodel.Dense(1, 32, 1), 0o600))

	c := newORT(t, compilers.ORTOptions{Worker: worker, User: &compilers.Credential{UID: nobody, GID: nobody}, Scratch: base})
	job := compilers.Job{Runtime: r, EPs: []compilers.EP{{Name: openVINO}}, Model: model, Folder: folder, Output: "m_ctx.onnx"}
	result, err := c.Compile(t.Context(), job, nil)
	if err != nil && !passable(r.ORTLibrary) {
		t.Skipf("the runtime is in a folder that other users cannot pass: %v", err)
	}
	require.NoError(t, err)
	for _, name := range append(result.Files, ".") {
		info, err := os.Stat(filepath.Join(folder, name))
		require.NoError(t, err)
		require.Zero(t, info.Sys().(*syscall.Stat_t).Uid, "%s still belongs to the worker", name)
	}
	prints, err := c.Fingerprint(t.Context(), r, job.EPs)
	require.NoError(t, err)
	require.NotEmpty(t, prints[0].SDKVersion)

	require.NoError(t, os.Chmod(base, 0o700))
	_, err = c.Compile(t.Context(), job, nil)
	require.Error(t, err, "the worker passed a folder that only root may pass: it was not another user")
}

// passable tells whether every folder above a file may be passed by anyone.
func passable(path string) bool {
	for dir := filepath.Dir(path); dir != "/"; dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err != nil || info.Mode()&1 == 0 {
			return false
		}
	}
	return true
}
