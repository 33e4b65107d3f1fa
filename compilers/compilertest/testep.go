package compilertest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/stretchr/testify/require"
)

// TestEP is the name of the plugin EP that is built from testdata/ep/testep: it compiles, and
// computes from, context binaries of its own.
const TestEP = "EpcachedTestExecutionProvider"

const testEPLibrary = "libonnxruntime_providers_epcachedtest.so"

// TestEPTable describes the test EP in the form of eps.toml, for compilers.AddEPs and for
// configurations.
const TestEPTable = `
[ep.` + TestEP + `]
libraries = ["` + testEPLibrary + `"]
fingerprint_options = ["target"]
hardware = ';hw=(.+)$'

[ep.` + TestEP + `.options]
ops = { policy = "allowed", kind = "string" }
partition = { policy = "allowed", kind = "string", default = "group" }
primaries = { policy = "allowed", kind = "string", default = "one" }
check = { policy = "allowed", kind = "bool", default = "1" }
notes = { policy = "allowed", kind = "string" }
target = { policy = "allowed", kind = "string" }
delay = { policy = "allowed", kind = "int", default = "0" }
fault = { policy = "allowed", kind = "string" }
`

// Release is what an installation of the test EP says of itself. Empty fields keep the EP's
// defaults.
type Release struct {
	Name string // of the EP; the tables of EPs know only TestEP
	// operators that it takes, separated by commas; "Mul" with Single: as ONNX Runtime's example
	// plugin EP
	Ops     string
	Single  bool   // it takes one node of a model
	Plain   bool   // it makes no EPContext nodes
	Least   int    // elements that the output of a node has at least, for the EP to take it
	Version string // of the EP
	// "MAJOR.MINOR.PATCH": another minor version loads, and asks for recompilation; another major
	// version does not load
	SDK      string
	Driver   string    // os_driver_version of the devices
	Hardware [2]string // hardware architecture of each device
	// "optimal", "prefer_recompilation", "unsupported", "not_applicable": what every compatibility
	// string is judged
	Verdict string
	// a guideline that it breaks, as the README of the test EP has them
	Mutant string
	// KIND@STAGE of testdata/ep/testep/fault.h, before there are provider options
	Fault string
}

func (r Release) text() string {
	var b strings.Builder
	single, plain, least := "", "", ""
	if r.Single {
		single = "1"
	}
	if r.Plain {
		plain = "1"
	}
	if r.Least > 0 {
		least = fmt.Sprint(r.Least)
	}
	for _, line := range [][2]string{{"name", r.Name}, {"ops", r.Ops}, {"single", single},
		{"plain", plain}, {"least", least}, {"version", r.Version}, {"sdk", r.SDK},
		{"driver", r.Driver},
		{"hardware.0", r.Hardware[0]}, {"hardware.1", r.Hardware[1]},
		{"verdict", r.Verdict}, {"mutant", r.Mutant}, {"fault", r.Fault}} {
		if line[1] != "" {
			fmt.Fprintf(&b, "%s = %s\n", line[0], line[1])
		}
	}
	return b.String()
}

var testEP struct {
	once sync.Once
	dir  string
	out  []byte
	err  error
}

// TestEPLibrary builds the test EP, once per test binary, and gives the library's path. Without a C
// compiler the test is skipped, and says so.
func TestEPLibrary(t testing.TB) string {
	t.Helper()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(strings.Fields(cc)[0]); err != nil {
		t.Skipf("NOT TESTED WITH THE TEST EP: no C compiler: %v", err)
	}
	testEP.once.Do(func() {
		var root string
		if root, testEP.err = moduleRoot(); testEP.err != nil {
			return
		}
		if testEP.dir, testEP.err = os.MkdirTemp("", "epcached-testep-"); testEP.err != nil {
			return
		}
		build := filepath.Join(root, "testdata", "ep", "testep", "build")
		testEP.out, testEP.err = exec.Command(build, testEP.dir).CombinedOutput()
	})
	require.NoError(t, testEP.err, "build the test EP: %s", testEP.out)
	return filepath.Join(testEP.dir, testEPLibrary)
}

// moduleRoot finds the module's directory above that of the tests, which is their working
// directory. The paths of source files do not show it, because they are short where tests are built
// with -trimpath.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if filepath.Dir(dir) == dir {
			return "", errors.New("no go.mod above the working directory")
		}
		dir = filepath.Dir(dir)
	}
	return "", err
}

// RemoveTestEP removes what TestEPLibrary built. Call it at the end of TestMain.
func RemoveTestEP() {
	if testEP.dir != "" {
		_ = os.RemoveAll(testEP.dir) // a leftover in the temporary directory does no harm
	}
}

// TestEPRuntime makes a runtime of a real ONNX Runtime of the given version, and the test EP in the
// given release, and adds the EP to the table. The test is skipped, and says so, where there is no
// such ONNX Runtime among the runtimes for tests.
func TestEPRuntime(t testing.TB, ort string, release Release) compilers.Runtime {
	t.Helper()
	dir := os.Getenv(RuntimesVariable)
	found, err := filepath.Glob(filepath.Join(dir, "*", "onnxruntime", "capi",
		"libonnxruntime.so."+ort))
	require.NoError(t, err)
	if dir == "" || len(found) == 0 {
		t.Skipf(
			"NOT TESTED WITH A REAL ONNX RUNTIME: no %s in %s=%q; testdata/fetch-runtimes gets it",
			ort, RuntimesVariable, dir)
	}
	require.NoError(t, compilers.AddEPs([]byte(TestEPTable)))
	directory := t.TempDir()
	require.NoError(t, os.Symlink(found[0], filepath.Join(directory, filepath.Base(found[0]))))
	return InstallTestEP(t, directory, release)
}

// InstallTestEP puts the test EP, in a release, into a runtime's directory, in the place of another
// release that may be there, as an update does: by renames. It gives what compilers.Find gives for
// the directory, and for a release with a name what compilers.Complete gives for its libraries.
func InstallTestEP(t testing.TB, dir string, release Release) compilers.Runtime {
	t.Helper()
	library, err := os.ReadFile(TestEPLibrary(t))
	require.NoError(t, err)
	// Loaders do not look at what follows the sections: each version is a file of its own.
	library = fmt.Appendf(library, "version %s, SDK %s\n", release.Version, release.SDK)
	replace(t, filepath.Join(dir, strings.TrimSuffix(testEPLibrary, ".so")+".release"),
		[]byte(release.text()))
	replace(t, filepath.Join(dir, testEPLibrary), library)
	if release.Name != "" {
		ort, err := filepath.Glob(filepath.Join(dir, "libonnxruntime.so.*"))
		require.NoError(t, err)
		r, err := compilers.Complete(compilers.Runtime{Directory: dir, ORTLibrary: ort[0],
			EPs: []compilers.EPLibrary{{EP: release.Name,
				Path: filepath.Join(dir, testEPLibrary)}}})
		require.NoError(t, err)
		return r
	}
	r, err := compilers.Find(dir)
	require.NoError(t, err)
	return r
}

func replace(t testing.TB, path string, data []byte) {
	require.NoError(t, os.WriteFile(path+".new", data, 0o755))
	require.NoError(t, os.Rename(path+".new", path))
}
