package compilertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/stretchr/testify/require"
)

// RuntimesVariable names the environment variable that points to a folder of runtimes, as testdata/fetch-runtimes makes it.
const RuntimesVariable = "EPCACHED_RUNTIMES"

// Runtime gives a real runtime by its name in that folder, e.g. "openvino-1.8.1" or "qnn-2.7.0". The test is skipped, and says so, when it is
// not there.
func Runtime(t testing.TB, name string) compilers.Runtime {
	t.Helper()
	dir := os.Getenv(RuntimesVariable)
	if dir == "" {
		t.Skipf("NOT TESTED WITH A REAL EP: %s is not set; testdata/fetch-runtimes makes such a folder", RuntimesVariable)
	}
	if _, err := os.Stat(filepath.Join(dir, name)); os.IsNotExist(err) {
		t.Skipf("NOT TESTED WITH A REAL EP: no %s in %s=%s; testdata/fetch-runtimes gets it", name, RuntimesVariable, dir)
	}
	r, err := compilers.Find(filepath.Join(dir, name))
	require.NoError(t, err)
	return r
}

var worker struct {
	once sync.Once
	path string
	out  []byte
	err  error
}

// Worker builds epcached-ort, once per test binary, and gives its path. It is built as `make build` does, without cgo and without the race detector,
// whatever the test is built with: then most of it is in Go's cache already.
func Worker(t testing.TB) string {
	t.Helper()
	worker.once.Do(func() {
		dir, err := os.MkdirTemp("", "epcached-worker-")
		if err != nil {
			worker.err = err
			return
		}
		worker.path = filepath.Join(dir, "epcached-ort")
		build := exec.Command("go", "build", "-trimpath", "-o", worker.path, "github.com/epcached/epcached/cmd/epcached-ort")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		worker.out, worker.err = build.CombinedOutput()
	})
	require.NoError(t, worker.err, "build epcached-ort: %s", worker.out)
	return worker.path
}

// RemoveWorker removes what Worker built. Call it at the end of TestMain.
func RemoveWorker() {
	if worker.path != "" {
		_ = os.RemoveAll(filepath.Dir(worker.path)) // a leftover in the temporary folder does no harm
	}
}
