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

// Settings are read by the Python side; clients/python/epcache/_run/_settings.py has the same
// fields.
type Settings struct {
	// EPs are the execution providers that sessions which ask for the CPU are sent to.
	EPs          []*wire.ExecutionProvider `json:"eps,omitempty"`
	Runtime      string                    `json:"runtime,omitempty"`
	OnMiss       string                    `json:"on_miss"`
	VerifyOutput float64                   `json:"verify_output,omitempty"`
}

// Environment returns the environment of a program whose sessions use the cache. report is the file
// that its processes append to, and socket the daemon's, "" for the default ones.
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
	// The last of two equal names is used.
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
		"epcachectl"), "pip install epcache installs both")
}

// Log is the file to which the processes of a program append events, one line of JSON each.
type Log struct {
	dir, Path string
}

// Event is one line. Which fields it has depends on the kind; clients/python/epcache/_run writes
// them.
type Event struct {
	// python, onnxruntime, session, raised (what would be one), other, failed
	Kind    string `json:"kind"`
	PID     int    `json:"pid"`
	Why     string `json:"why,omitempty"`
	Version string `json:"version,omitempty"` // of Python, or of onnxruntime
	Old     bool   `json:"old,omitempty"`     // a Python that epcache is not for
	File    string `json:"file,omitempty"`    // path of onnxruntime
	What    string `json:"what,omitempty"`    // of kind other: the package or library

	Model          string   `json:"model,omitempty"`
	Outcome        string   `json:"outcome,omitempty"`
	Asked          []string `json:"asked,omitempty"` // execution providers that the program named
	Sent           bool     `json:"sent,omitempty"`  // to those of --ep
	Providers      []string `json:"providers,omitempty"`
	Compatibility  string   `json:"compatibility,omitempty"`
	Build          string   `json:"build,omitempty"`
	CompileSeconds float64  `json:"compile_seconds,omitempty"`
	AcquireSeconds float64  `json:"acquire_seconds,omitempty"`
	LoadSeconds    float64  `json:"load_seconds,omitempty"`
}

// Bounds on what a program can make its report: it is written by the program's processes.
const (
	lineLimit  = 64 << 10
	eventLimit = 10000
)

// NewLog makes the file, in a directory of its own.
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

// Remove leaves processes that outlive the program without a report, which they bear.
func (l *Log) Remove() {
	os.RemoveAll(l.dir) // in the directory for what is temporary
}

// read returns what happened, oldest first, and whether there was more than it took.
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
