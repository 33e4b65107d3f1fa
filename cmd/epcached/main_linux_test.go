package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/compilertest"
)

// programs is the directory of the built epcached, epcached-ort and epcached-remote: EPCACHED_BIN,
// or one that TestMain builds into.
var programs string

// The tests of this package start the built daemon, and so test the program that users run. Those
// that take long run in parallel, but for the few that look at processes of all tests. Tests
// that compile need a real runtime: EPCACHED_RUNTIMES is the directory in which
// testdata/fetch-runtimes leaves them.
func TestMain(m *testing.M) {
	if order := os.Getenv(askerEnvironment); order != "" {
		os.Exit(runAsker(order)) // this process is one of the applications of a test
	}
	if order := os.Getenv(fuseEnvironment); order != "" {
		os.Exit(serveFUSE(order)) // this process is a file system of a test
	}
	if order := os.Getenv(flooderEnvironment); order != "" {
		os.Exit(flood(order)) // this process floods the daemon of a test
	}
	if os.Getenv(stopperEnvironment) != "" {
		// this process becomes a daemon, unless that fails
		fmt.Fprintln(os.Stderr, becomeStopped(os.Args[1:]))
		os.Exit(3)
	}
	if os.Getenv(controlledEnvironment) != "" {
		os.Exit(controlled()) // this process is a daemon
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	if programs = os.Getenv("EPCACHED_BIN"); programs == "" {
		dir, err := os.MkdirTemp("", "epcached-bin-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		build := exec.Command("go", "build", "-trimpath", "-o", dir+"/", "../epcached",
			"../epcached-ort", "../epcached-remote")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "building the programs: %v\n%s", err, out)
			return 1
		}
		programs = dir
	}
	if os.Getenv("EPCACHED_RUNTIMES") == "" {
		fmt.Fprintln(os.Stderr, "SKIPPED: EPCACHED_RUNTIMES is not set: no test of cmd/epcached "+
			"that compiles a model is run; make test sets it")
	}
	defer compilertest.RemoveTestEP()
	return m.Run()
}

// The runtimes that tests name; the Makefile fetches them.
const (
	openVINO = "openvino-1.8.1"
	qnn      = "qnn-2.7.0"
	olderQNN = "qnn-2.5.0"

	// writes no compatibility string, and reads no other version's builds
	olderOpenVINO = "openvino-1.4.0"
)

// runtimeDir returns a real runtime, and skips the test loudly where it is not there.
func runtimeDir(t testing.TB, name string) string {
	t.Helper()
	root := os.Getenv("EPCACHED_RUNTIMES")
	if root == "" {
		t.Skip("SKIPPED: EPCACHED_RUNTIMES is not set")
	}
	dir := filepath.Join(root, name)
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("SKIPPED: the runtime %s is not in EPCACHED_RUNTIMES: %v", name, err)
	}
	dir, err := filepath.EvalSymlinks(dir)
	require.NoError(t, err)
	return dir
}

// shortDir is a temporary directory with a path that is short enough for a socket. It is in memory
// if that can be, so that no test waits for a disk: the processes of these tests are killed, but
// the machine is not.
func shortDir(t testing.TB) string {
	t.Helper()
	parent := "/dev/shm"
	var room unix.Statfs_t
	if unix.Statfs(parent, &room) != nil || room.Bavail*uint64(room.Bsize) < 4<<30 {
		parent = ""
	}
	dir, err := os.MkdirTemp(parent, "epc-")
	require.NoError(t, err)
	t.Cleanup(func() { removeAll(t, dir) })
	return dir
}

// removeAll removes a tree in which directories may be read-only, as views are.
func removeAll(t testing.TB, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			return os.Chmod(path, 0o700)
		}
		return err
	})
	if err == nil {
		err = os.RemoveAll(dir)
	}
	require.NoError(t, err)
}
