//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

// elsewhereEnvironment makes the test binary an application that has nothing of an artefact but the
// descriptor of a view, as number 3.
const elsewhereEnvironment = "EPCACHED_TEST_ELSEWHERE"

// elsewhereOrder is what such an application is to do. It answers with the digest of what the model
// computes, or the error, for each way.
type elsewhereOrder struct {
	ORT, EP string
	Graph   string // relative to the view
	// words of: bytes, context (ep.context_file_path), directory
	// (…external_initializers_file_dir_path), memory (files from memory)
	Ways []string
	Hide string // not empty: a directory that is covered first, in a mount namespace of its own
}

// runElsewhere is the application's main function.
func runElsewhere(text string) int {
	var o elsewhereOrder
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	answers, err := o.do()
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(answers)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (o elsewhereOrder) do() (map[string]string, error) {
	if o.Hide != "" {
		if err := unix.Mount("none", o.Hide, "tmpfs", 0, ""); err != nil {
			return nil, fmt.Errorf("cover %q: %w", o.Hide, err)
		}
	}
	api, err := ort.Open(o.ORT)
	if err != nil {
		return nil, err
	}
	env, err := api.NewEnv(io.Discard, nil)
	if err != nil {
		return nil, err
	}
	if err := env.Register(compilertest.TestEP, o.EP); err != nil {
		return nil, err
	}
	answers := map[string]string{}
	for _, way := range o.Ways {
		sum, err := o.load(env, way)
		if err != nil {
			sum = err.Error()
		}
		answers[way] = sum
	}
	return answers, nil
}

func (o elsewhereOrder) load(env *ort.Env, way string) (string, error) {
	options, err := env.NewSessionOptions()
	if err != nil {
		return "", err
	}
	defer options.Release()
	devices, err := env.Devices()
	if err != nil {
		return "", err
	}
	for i, d := range devices {
		if d.EP == compilertest.TestEP {
			if err := options.Append(devices[i:i+1], nil); err != nil {
				return "", err
			}
			break
		}
	}
	path := filepath.Join("/proc/self/fd/3", o.Graph)
	if strings.Contains(way, "context") {
		err = options.Set("ep.context_file_path", path)
	}
	if err == nil && strings.Contains(way, "directory") {
		err = options.Set("session.model_external_initializers_file_folder_path",
			filepath.Dir(path))
	}
	if err != nil {
		return "", err
	}
	if strings.Contains(way, "memory") {
		data, err := os.ReadFile(filepath.Join(filepath.Dir(path), "rest.bin"))
		if err != nil {
			return "", err
		}
		free, err := options.AddExternalFile("rest.bin", data)
		if err != nil {
			return "", err
		}
		defer free()
	}
	open := func() (*ort.Session, error) { return options.Open(path) }
	if strings.Contains(way, "bytes") {
		model, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		open = func() (*ort.Session, error) { return options.OpenBytes(model) }
	}
	s, err := open()
	if err != nil {
		return "", err
	}
	defer s.Release()
	return computes(s)
}

// computes runs a session of one input [2, 16] and gives the digest of its output.
func computes(s *ort.Session) (string, error) {
	inputs, err := s.Inputs()
	if err != nil {
		return "", err
	}
	inputs[0].Data = tinymodel.Floats(5, 2*width)
	outputs, err := s.Run(inputs)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", sha256.Sum256(outputs[0].Data)), nil
}

// copied puts a file where every user may read it.
func copied(t *testing.T, from, dir string) string {
	from, err := filepath.EvalSymlinks(from)
	require.NoError(t, err)
	in, err := os.Open(from)
	require.NoError(t, err)
	defer in.Close() // only read
	path := filepath.Join(dir, filepath.Base(from))
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	require.NoError(t, err)
	_, err = io.Copy(out, in)
	require.NoError(t, err)
	require.NoError(t, out.Close())
	return path
}

// Artefacts load through the descriptor of their view: by its path in /proc, or from bytes with
// session options that name that path. Initializers in files are the exception for an application
// that cannot reach the view's real path: ONNX Runtime resolves that path, unless it is given them.
func TestLoadingElsewhere(t *testing.T) {
	ways := []string{"path", "path memory", "bytes", "bytes context", "bytes directory",
		"bytes context directory", "bytes context memory"}
	for _, version := range []string{oldestORT, newestORT} {
		e := newElsewhere(t, version, ways)
		for _, row := range []struct {
			name string
			c    ort.Compilation
			// the ways that do not load: where the real path can be reached, and where it cannot
			here, absent []string
		}{
			{"sidecar", ort.Compilation{}, []string{"bytes"}, []string{"bytes"}},
			{"embedded", ort.Compilation{Embed: true}, nil, nil},
			{"sidecar, and initializers in a file", ort.Compilation{InitializersFile: "rest.bin"},
				[]string{"bytes", "bytes context"},
				[]string{"path", "bytes", "bytes context", "bytes directory",
					"bytes context directory"}},
			{"embedded, and initializers in a file",
				ort.Compilation{Embed: true, InitializersFile: "rest.bin"},
				[]string{"bytes", "bytes context"},
				[]string{"path", "bytes", "bytes context", "bytes directory",
					"bytes context directory"}},
		} {
			for _, who := range []string{"who made it", "another user", "another mount namespace"} {
				t.Run(version+"/"+row.name+"/"+who, func(t *testing.T) {
					if os.Geteuid() != 0 && who != "who made it" {
						t.Skip("NOT TESTED AS ANOTHER USER OR IN ANOTHER MOUNT NAMESPACE: only " +
							"root can become one and make the other")
					}
					want := row.absent
					if who == "who made it" {
						want = row.here
					}
					require.ElementsMatch(t, want, e.refused(t, row.c, who))
				})
			}
		}
	}
}

// elsewhereTest has copies of an application and its libraries where every user may go.
type elsewhereTest struct {
	base, application string
	order             elsewhereOrder
	host              host
}

func newElsewhere(t *testing.T, version string, ways []string) elsewhereTest {
	r := compilertest.TestEPRuntime(t, version, compilertest.Release{})
	base, err := os.MkdirTemp("", "epc-elsewhere-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(base)) })
	require.NoError(t, os.Chmod(base, 0o755))
	self, err := os.Executable()
	require.NoError(t, err)
	return elsewhereTest{base, copied(t, self, base),
		elsewhereOrder{ORT: copied(t, r.ORTLibrary, base), EP: copied(t, r.EPs[0].Path, base),
			Graph: "0badcafe/x_ctx.onnx", Ways: ways},
		hostOf(t, version)}
}

// refused compiles into a view with a parent that only its owner may enter, and returns the ways by
// which the application does not get the same result.
func (e elsewhereTest) refused(t *testing.T, c ort.Compilation, who string) []string {
	state, err := os.MkdirTemp(e.base, "state-")
	require.NoError(t, err)
	view := filepath.Join(state, "view")
	require.NoError(t, os.MkdirAll(filepath.Join(view, filepath.Dir(e.order.Graph)), 0o755))
	c.ModelPath, c.OutputPath = write(t, t.TempDir(), "x.onnx", layers(1, 2, false)),
		filepath.Join(view, e.order.Graph)
	// MatMul and Add, with their weights, are the CPU's
	_, err = e.host.options(t, nil, set{"ops": "Mul,Relu"}).Compile(c)
	require.NoError(t, err)
	require.NoError(t,
		filepath.WalkDir(view,
			func(path string, d os.DirEntry, err error) error { return os.Chmod(path, 0o755) }))
	s := e.host.open(t, c.ModelPath, nil, set{"ops": "Mul,Relu"})
	defer s.Release()
	want, err := computes(s)
	require.NoError(t, err)
	var refused []string
	for way, got := range e.run(t, state, view, who, c.InitializersFile) {
		t.Logf("%s: %s", way, got)
		if got != want {
			require.Contains(t, got, " ", "another result would be worse than none")
			refused = append(refused, way)
		}
	}
	return refused
}

func (e elsewhereTest) run(t *testing.T, state, view, who, rest string) map[string]string {
	d, err := os.Open(view)
	require.NoError(t, err)
	defer d.Close() // the application has its own
	o := e.order
	cmd := exec.Command(e.application)
	switch who {
	case "another user":
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534,
			Gid: 65534}}
	case "another mount namespace":
		o.Hide, cmd.SysProcAttr = state, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	}
	if rest == "" {
		o.Ways = slices.DeleteFunc(slices.Clone(o.Ways),
			func(way string) bool { return strings.Contains(way, "memory") })
	}
	order, err := json.Marshal(o)
	require.NoError(t, err)
	cmd.Env, cmd.ExtraFiles, cmd.Stderr = []string{elsewhereEnvironment + "=" + string(order)},
		[]*os.File{d}, os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	var answers map[string]string
	require.NoError(t, json.Unmarshal(out, &answers))
	require.Len(t, answers, len(o.Ways))
	return answers
}
