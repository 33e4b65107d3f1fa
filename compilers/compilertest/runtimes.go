package compilertest

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/stretchr/testify/require"
)

// RuntimesVariable names the environment variable that points to a directory of runtimes, as
// testdata/fetch-runtimes makes it.
const RuntimesVariable = "EPCACHED_RUNTIMES"

// Runtime returns a real runtime by its name in that directory, e.g. "openvino-1.8.1" or
// "qnn-2.7.0". The test is skipped, and says so, when it is not there.
func Runtime(t testing.TB, name string) compilers.Runtime {
	t.Helper()
	dir := os.Getenv(RuntimesVariable)
	if dir == "" {
		t.Skipf(
			"NOT TESTED WITH A REAL EP: %s is not set; testdata/fetch-runtimes makes such a "+
				"directory",
			RuntimesVariable)
	}
	if _, err := os.Stat(filepath.Join(dir, name)); os.IsNotExist(err) {
		t.Skipf("NOT TESTED WITH A REAL EP: no %s in %s=%s; testdata/fetch-runtimes gets it", name,
			RuntimesVariable, dir)
	}
	r, err := compilers.Find(filepath.Join(dir, name))
	require.NoError(t, err)
	return r
}

// program is one that tests build, once per test binary.
type program struct {
	once sync.Once
	path string
	out  []byte
	err  error
}

var worker, runner, conformance program

// built returns the program's path. It is built as `make build` does, without cgo and without the
// race detector, whatever the test is built with: then most of it is in Go's cache already.
func (p *program) built(t testing.TB, name string) string {
	t.Helper()
	p.once.Do(func() {
		dir, err := os.MkdirTemp("", "epcached-worker-")
		if err != nil {
			p.err = err
			return
		}
		p.path = filepath.Join(dir, filepath.Base(name))
		build := exec.Command("go", "build", "-trimpath", "-o", p.path,
			"github.com/epcached/epcached/"+name)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		p.out, p.err = build.CombinedOutput()
	})
	require.NoError(t, p.err, "build %s: %s", name, p.out)
	return p.path
}

// Worker returns the path of epcached-ort: that in EPCACHED_BIN, or one that is built.
func Worker(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("EPCACHED_BIN"); dir != "" {
		path := filepath.Join(dir, "epcached-ort")
		_, err := os.Stat(path) // so that go test knows that its result is of this file
		require.NoError(t, err)
		return path
	}
	return worker.built(t, "cmd/epcached-ort")
}

// Conformance returns the path of the tool for authors of EPs, which tries guidelines as
// epcached-ort would.
func Conformance(t testing.TB) string {
	t.Helper()
	return conformance.built(t, "testdata/ep/conformance")
}

func Outputs(t testing.TB, job compilers.CheckJob, seed uint64) []byte {
	t.Helper()
	order := map[string]any{"ORTLibrary": job.Runtime.ORTLibrary,
		"Graphs": append([]string{job.Graph}, job.Share...), "Seed": seed,
		"Session": map[string]any{"Entries": job.SessionOptions,
			"GraphOptimizationLevel": job.GraphOptimizationLevel}}
	var eps []compilers.EP
	for _, ep := range job.EPs {
		lib, err := job.Runtime.Library(ep.Name)
		require.NoError(t, err)
		info, _ := compilers.EPByName(ep.Name)
		ep.Library, ep.Options = lib.Path, info.Resolve(lib.Path, ep.Options)
		eps = append(eps, ep)
	}
	order["EPs"] = eps
	text, err := json.Marshal(order)
	require.NoError(t, err)
	outputs, err := os.Create(filepath.Join(t.TempDir(), "outputs"))
	require.NoError(t, err)
	defer outputs.Close() // read below
	cmd := exec.Command(runner.built(t, "testdata/run"), string(text))
	cmd.ExtraFiles = []*os.File{outputs}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	data, err := os.ReadFile(outputs.Name())
	require.NoError(t, err)
	require.NotEmpty(t, data)
	return data
}

// RemoveWorker removes what Worker and Outputs built. Call it at the end of TestMain.
func RemoveWorker() {
	for _, p := range []*program{&worker, &runner, &conformance} {
		if p.path != "" {
			// a leftover in the temporary directory does no harm
			_ = os.RemoveAll(filepath.Dir(p.path))
		}
	}
}
