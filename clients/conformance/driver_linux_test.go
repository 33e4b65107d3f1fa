package conformance

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// client is a client of the protocol, by the program that drives it.
type client struct {
	name    string
	command func(t *testing.T) []string
	// it starts a process for each question, and the 50 ms of the others are not to be spent on
	// that
	alone   bool
	without map[string]string // rows that cannot hold for it, by name, and why
}

// clients are all that there are. A further one is added here.
var clients = []client{
	{name: "go",
		command: func(t *testing.T) []string { return []string{built(t, "./drivers/go")} }},
	{name: "epcachectl", command: func(t *testing.T) []string {
		return []string{built(t, "./drivers/epcachectl"), built(t, "../../cmd/epcachectl")}
	}, alone: true, without: map[string]string{
		"a hello that comes late":                             patient,
		"a hello that does not come":                          patient,
		"a hello of one byte a second":                        patient,
		"a daemon that was stopped":                           patient,
		"a daemon that was stopped, asked thrice":             patient,
		"a daemon that was stopped, and has a full backlog":   patient,
		"dies of the request, then closes instead of a hello": patient,
		"dies of the request, then is stopped":                patient,
		"stopped during the request":                          patient,
		"stopped between two requests":                        patient,
		"refused with the hello": "what is refused before there is " +
			"a question is said in words, without its class",
		"a large request that is not read": "no argument may be so long",
	}},
	{name: "python", command: func(t *testing.T) []string {
		python := os.Getenv("EPCACHED_PYTHON")
		// its client needs nothing but the language
		if _, err := exec.LookPath(python); err != nil {
			python = "python3"
		}
		return []string{python, "drivers/python/driver.py"}
	}},
}

// patient is why rows do not hold that are about the 50 ms after which applications go on without a
// daemon.
const patient = "epcachectl, which has nothing else to go on with, waits ten seconds for a daemon"

// built builds a program as `make build` does, which has most of it in Go's cache, and looks at all
// that it is made of: then go test knows that its result is of these files.
func built(t *testing.T, directory string) string {
	list, err := exec.Command("go", "list", "-deps", "-f",
		"{{if and .Module .Module.Main}}{{.Dir}}{{end}}", directory).Output()
	require.NoError(t, err)
	for dir := range strings.FieldsSeq(string(list)) {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		require.NoError(t, err)
		for _, file := range files {
			_, err := os.Stat(file)
			require.NoError(t, err)
		}
	}
	program := filepath.Join(t.TempDir(), filepath.Base(directory))
	build := exec.Command("go", "build", "-trimpath", "-o", program, directory)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

// question and answer are the lines of the dialogue with a driver; README.md describes them.
type question struct {
	Do        string `json:"do"`
	Socket    string `json:"socket,omitempty"`
	Model     string `json:"model,omitempty"`
	Options   int    `json:"options,omitempty"`
	Adopt     bool   `json:"adopt,omitempty"`
	TimeoutMs int    `json:"timeout_ms,omitempty"`
	HelloMs   int    `json:"hello_ms,omitempty"`
}

type answer struct {
	Outcome string   `json:"outcome"`
	Content string   `json:"content"`
	Phases  []string `json:"phases"`
	Error   string   `json:"error"` // a class of the protocol, NO_DAEMON or PROTOCOL
	Text    string   `json:"text"`
}

// driver is a client's program that runs.
type driver struct {
	t       *testing.T
	process *exec.Cmd
	in      io.WriteCloser
	lines   chan []byte
}

func startDriver(t *testing.T, command []string) *driver {
	t.Helper()
	d := &driver{t: t, process: exec.Command(command[0], command[1:]...), lines: make(chan []byte)}
	d.process.Stderr = os.Stderr
	var err error
	d.in, err = d.process.StdinPipe()
	require.NoError(t, err)
	out, err := d.process.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, d.process.Start())
	go func() {
		defer close(d.lines)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			d.lines <- append([]byte(nil), lines.Bytes()...)
		}
	}()
	t.Cleanup(func() {
		d.in.Close()
		// A client that hangs does not hold up the test, and one that is well has ended by itself.
		timer := time.AfterFunc(time.Minute, func() { d.process.Process.Kill() })
		defer timer.Stop()
		for range d.lines {
		}
		require.NoError(t, d.process.Wait())
	})
	return d
}

// ask waits for the answer. A client that gives none in time hangs, and hanging is what it must
// never do.
func (d *driver) ask(q question) answer {
	d.t.Helper()
	line, err := json.Marshal(q)
	require.NoError(d.t, err)
	_, err = d.in.Write(append(line, '\n'))
	require.NoError(d.t, err, "the driver has ended")
	select {
	case line, ok := <-d.lines:
		require.True(d.t, ok, "the driver has ended")
		var a answer
		require.NoError(d.t, json.Unmarshal(line, &a), "%s", line)
		return a
	case <-time.After(2 * time.Minute):
		d.process.Process.Kill()
		require.FailNow(d.t, "the client hangs")
	}
	return answer{}
}

// descriptors returns what the driver has open.
func (d *driver) descriptors() map[string]string {
	dir := fmt.Sprintf("/proc/%d/fd", d.process.Process.Pid)
	entries, err := os.ReadDir(dir)
	require.NoError(d.t, err)
	open := map[string]string{}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err == nil {
			open[e.Name()] = target
		}
	}
	return open
}
