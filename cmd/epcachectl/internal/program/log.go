package program

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
)

// Log is the file that the processes of a program append to: a line of JSON for each thing that happened.
type Log struct {
	dir, Path string
}

// Event is one line. Which fields it has depends on the kind; clients/python/epcache/_run writes them.
type Event struct {
	Kind    string `json:"kind"` // python, onnxruntime, session, raised (what would be one), other, failed
	PID     int    `json:"pid"`
	Why     string `json:"why,omitempty"`
	Version string `json:"version,omitempty"` // of Python, or of onnxruntime
	Old     bool   `json:"old,omitempty"`     // a Python that epcache is not for
	File    string `json:"file,omitempty"`    // where onnxruntime stands
	What    string `json:"what,omitempty"`    // of other: the package, or library

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

// NewLog makes the file, in a folder of its own.
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
	os.RemoveAll(l.dir) // in the folder for what is temporary
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
	for lines.Scan() {
		if len(events) == eventLimit {
			return events, true, nil
		}
		var e Event
		if json.Unmarshal(lines.Bytes(), &e) == nil { // a process may have been killed within a line
			events = append(events, e)
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return events, true, nil
	}
	return events, false, lines.Err()
}
