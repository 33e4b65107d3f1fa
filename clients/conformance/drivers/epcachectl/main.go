// Command epcachectl drives the command line through the conformance suite, as a script would: a
// question a line on standard input, each a call of epcachectl of its own, its answer a line on
// standard output. See the README of the suite.
//
//	epcachectl PATH-OF-EPCACHECTL
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

type question struct {
	Do        string `json:"do"`
	Socket    string `json:"socket"`
	Model     string `json:"model"`
	Options   int    `json:"options"`
	Adopt     bool   `json:"adopt"`
	TimeoutMs int    `json:"timeout_ms"`
}

type answer struct {
	Outcome string   `json:"outcome,omitempty"`
	Content string   `json:"content,omitempty"`
	Phases  []string `json:"phases,omitempty"`
	Error   string   `json:"error,omitempty"`
	Text    string   `json:"text,omitempty"`
}

func main() {
	// The first call has the language open what it keeps, which no row is to be blamed for.
	if _, err := call(question{}, "version"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	out := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var q question
		err := json.Unmarshal(lines.Bytes(), &q)
		if err == nil {
			var a answer
			if a, err = answerTo(q); err == nil {
				err = out.Encode(a)
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func answerTo(q question) (answer, error) {
	switch q.Do {
	case "forget":
		return answer{}, nil // nothing to forget: each question starts a new process
	case "jobs":
		e, err := call(q, "jobs", "--json")
		if err != nil || e.status != 0 {
			return e.failed("", ""), err
		}
		return answer{Outcome: "jobs"}, nil
	}
	return acquire(q)
}

// modelResult is what of get --json the suite asks for.
type modelResult struct {
	Outcome string `json:"outcome"`
	Class   string `json:"class"`
	Error   string `json:"error"`
	View    string `json:"view"`
}

func acquire(q question) (answer, error) {
	dir, err := os.MkdirTemp("", "conf")
	if err != nil {
		return answer{}, err
	}
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "out")
	e, err := call(q, "get", q.Model, "--ep", "E", "--option", "o="+strings.Repeat("x", q.Options),
		"--json", "--progress", "--out", out, fmt.Sprintf("--adopt=%v", q.Adopt))
	if err != nil {
		return answer{}, err
	}
	var results []modelResult
	if bytes.HasPrefix(e.out, []byte("{")) { // the error of a call that asked no daemon
		var f struct{ Error string }
		if err := json.Unmarshal(e.out, &f); err != nil {
			return answer{}, fmt.Errorf("get --json printed %q: %w", e.out, err)
		}
		return e.failed("", f.Error), nil
	}
	if len(e.out) > 0 {
		if err := json.Unmarshal(e.out, &results); err != nil || len(results) != 1 {
			return answer{}, fmt.Errorf("get --json printed %q: %w", e.out, err)
		}
	}
	if len(results) == 0 || results[0].Outcome == "failed" {
		var class, text string
		if len(results) == 1 {
			class, text = results[0].Class, results[0].Error
		}
		return e.failed(class, text), nil
	}
	a := answer{Outcome: results[0].Outcome, Phases: e.phases()}
	if results[0].View == "" {
		return a, nil // and --out said that there is nothing to copy
	}
	if e.status != 0 {
		return e.failed("", ""), nil
	}
	content, err := os.ReadFile(filepath.Join(out, "x_ctx.onnx"))
	a.Content = string(content)
	return a, err
}

// ended is one call of epcachectl.
type ended struct {
	status    int
	out, said []byte
}

func call(q question, args ...string) (ended, error) {
	limit := fmt.Sprintf("--timeout=%dms", q.TimeoutMs)
	cmd := exec.Command(os.Args[1], append(args, "--socket", q.Socket, "--wait", "0s", limit)...)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	err := cmd.Run()
	if _, is := errors.AsType[*exec.ExitError](err); err != nil && !is {
		return ended{}, err
	}
	return ended{cmd.ProcessState.ExitCode(), out.Bytes(), said.Bytes()}, nil
}

// failed names an error as the suite does: by the class in --json, else by what a script has, the
// exit status and the text.
func (e ended) failed(class, text string) answer {
	if text == "" {
		text = string(e.said)
	}
	switch {
	case strings.Contains(text, "protocol: "):
		class = "PROTOCOL"
	case class != "":
	case e.status == 5:
		class = "NO_DAEMON"
	case strings.Contains(text, "speaks protocol version"):
		class = "VERSION"
	case strings.Contains(text, "no result within"):
		class = "DEADLINE"
	default:
		class = fmt.Sprintf("exit status %d", e.status)
	}
	return answer{Error: class, Text: text}
}

// phases are what --progress prints, a line for each: "epcachectl: PHASE MODEL".
func (e ended) phases() []string {
	var phases []string
	for line := range strings.Lines(string(e.said)) {
		if words := strings.Fields(line); len(words) == 3 && words[0] == "epcachectl:" {
			phases = append(phases, words[1])
		}
	}
	return phases
}
