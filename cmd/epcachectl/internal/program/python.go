package program

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock/wire"
)

// Settings go to the Python processes: clients/python/epcache/_run/_settings.py reads the same
// fields.
type Settings struct {
	// EPs replace the CPU's execution provider in sessions that use it.
	EPs          []*wire.ExecutionProvider `json:"eps,omitempty"`
	Runtime      string                    `json:"runtime,omitempty"`
	OnMiss       string                    `json:"on_miss"`
	VerifyOutput float64                   `json:"verify_output,omitempty"`
}

// Environment returns the environment of a program, so that its sessions use the cache. Its
// processes append events to the file report. socket is the daemon's; "" means the default ones.
func Environment(settings Settings, report, socket string) ([]string, error) {
	hook, err := findHook()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(settings)
	if err != nil {
		return nil, err
	}
	path := hook
	if own := os.Getenv("PYTHONPATH"); own != "" {
		path += string(os.PathListSeparator) + own
	}
	// Of two variables with the same name, the last is used.
	environment := append(os.Environ(), "PYTHONPATH="+path, "EPCACHE_RUN="+string(text),
		"EPCACHE_RUN_REPORT="+report)
	if socket != "" {
		if socket, err = filepath.Abs(socket); err != nil {
			return nil, err
		}
		environment = append(environment, "EPCACHE_SOCKET="+socket)
	}
	return environment, nil
}

// PythonPackages returns the directory of the package epcache that belongs to this program.
func PythonPackages() (string, error) {
	hook, err := findHook()
	return filepath.Clean(filepath.Join(hook, "../../..")), err
}

func findHook() (string, error) {
	program, err := os.Executable()
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(program); err == nil {
		program = real
	}
	for _, place := range []string{ // patterns relative to the program's directory
		"../..",             // the wheel: epcache/NAME/epcachectl
		"../clients/python", // a checkout: bin/epcachectl
		"../lib/python3*/site-packages", "../lib/epcached/python", "../share/epcached/python",
		"../lib/python3/dist-packages",
	} {
		found, err := filepath.Glob(filepath.Join(filepath.Dir(program), place, "epcache", "_run",
			"hook", "sitecustomize.py"))
		if err == nil && len(found) > 0 {
			return filepath.Dir(found[len(found)-1]), nil
		}
	}
	return "", exit.Hint(exit.Missing("the Python package epcache is not beside "+
		"epcachectl"), "install the wheel that make wheel builds, with pip: it has both")
}

// Log is the file to which the processes of a program append events, one line of JSON each.
type Log struct {
	dir, Path string
}

// Event is one line. Which fields it has depends on the kind; clients/python/epcache/_run writes
// them.
type Event struct {
	// python, onnxruntime, session, compile (by ModelCompiler), raised (a session that could not be
	// made), other, failed
	Kind    string `json:"kind"`
	PID     int    `json:"pid"`
	Why     string `json:"why,omitempty"`
	Version string `json:"version,omitempty"` // of Python, or of onnxruntime
	Old     bool   `json:"old,omitempty"`     // the Python is older than epcache supports
	File    string `json:"file,omitempty"`    // path of onnxruntime
	What    string `json:"what,omitempty"`    // of kind other: the package or library

	Model   string `json:"model,omitempty"`
	Outcome string `json:"outcome,omitempty"`
	// execution providers that the program selected
	Asked []string `json:"asked,omitempty"`
	// the session got the execution providers of --ep
	Sent           bool     `json:"sent,omitempty"`
	Providers      []string `json:"providers,omitempty"`
	Compatibility  string   `json:"compatibility,omitempty"`
	Build          string   `json:"build,omitempty"`
	CompileSeconds float64  `json:"compile_seconds,omitempty"`
	AcquireSeconds float64  `json:"acquire_seconds,omitempty"`
	LoadSeconds    float64  `json:"load_seconds,omitempty"`
}

// Bounds on the report, because the program's processes, which write it, may be faulty.
const (
	lineLimit  = 64 << 10
	eventLimit = 10000
)

// NewLog makes an empty log in a new temporary directory.
func NewLog() (*Log, error) {
	dir, err := os.MkdirTemp("", "epcachectl-run-")
	if err != nil {
		return nil, err
	}
	log := &Log{dir, filepath.Join(dir, "report")}
	if err := os.WriteFile(log.Path, nil, 0o600); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return log, nil
}

// Remove removes the log. Processes that outlive the program tolerate its absence.
func (l *Log) Remove() {
	os.RemoveAll(l.dir) // if it fails, the system cleans its temporary directory
}

// read returns the events, oldest first, and whether there are more than its limits allow.
func (l *Log) read() (events []Event, more bool, err error) {
	f, err := os.Open(l.Path)
	if err != nil {
		return nil, false, err
	}
	defer f.Close() // only read
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, lineLimit)
	for len(events) < eventLimit && lines.Scan() {
		var e Event
		// a process may have been killed within a line
		if json.Unmarshal(lines.Bytes(), &e) == nil {
			events = append(events, e)
		}
	}
	if lines.Scan() || errors.Is(lines.Err(), bufio.ErrTooLong) {
		return events, true, nil
	}
	return events, false, lines.Err()
}
