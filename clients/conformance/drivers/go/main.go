// Command go drives the Go client through the conformance suite: a question a line on standard
// input, its answer a line on standard output. See the README of the suite.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/epcached/epcached/clients/epcache"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

type question struct {
	Do        string `json:"do"`
	Socket    string `json:"socket"`
	Model     string `json:"model"`
	Options   int    `json:"options"`
	Adopt     bool   `json:"adopt"`
	TimeoutMs int    `json:"timeout_ms"`
	HelloMs   int    `json:"hello_ms"`
}

type answer struct {
	Outcome string   `json:"outcome,omitempty"`
	Content string   `json:"content,omitempty"`
	Phases  []string `json:"phases,omitempty"`
	Error   string   `json:"error,omitempty"`
	Text    string   `json:"text,omitempty"`
}

func main() {
	out := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var q question
		err := json.Unmarshal(lines.Bytes(), &q)
		if err == nil {
			err = out.Encode(answerTo(q))
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func answerTo(q question) (a answer) {
	ctx, stop := context.WithTimeout(context.Background(),
		time.Duration(q.TimeoutMs)*time.Millisecond)
	defer stop()
	dialer := unixsock.Dialer{Name: "conformance", HelloTimeout: unixsock.QuickHelloTimeout}
	if q.HelloMs > 0 {
		dialer.HelloTimeout = time.Duration(q.HelloMs) * time.Millisecond
	}
	var ask func(*unixsock.Client) error
	switch q.Do {
	case "forget":
		return a // every question has a connection of its own
	case "jobs":
		ask = func(c *unixsock.Client) error {
			_, err := unixsock.Ask[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
			a.Outcome = "jobs"
			return err
		}
	default:
		ask = func(c *unixsock.Client) error { return acquire(ctx, c, q, &a) }
	}
	if err := epcache.Ask(ctx, dialer, time.Second, ask, q.Socket); err != nil {
		return answer{Error: classOf(err), Text: err.Error()}
	}
	return a
}

func acquire(ctx context.Context, c *unixsock.Client, q question, a *answer) error {
	model, err := os.Open(q.Model)
	if err != nil {
		return err
	}
	defer model.Close()
	ep := &wire.ExecutionProvider{Name: "E",
		Options: map[string]string{"o": strings.Repeat("x", q.Options)}}
	request := &wire.Acquire{Model: &wire.Model{Name: "model.onnx"},
		Eps: []*wire.ExecutionProvider{ep}, Adopt: q.Adopt}
	external := func(_ int, location string) (*os.File, error) {
		root, err := os.OpenRoot(strings.TrimSuffix(q.Model, "/model.onnx"))
		if err != nil {
			return nil, err
		}
		defer root.Close()
		return root.Open(location)
	}
	progress := func(p *wire.Progress) { a.Phases = append(a.Phases, p.GetPhase()) }
	a.Phases = nil
	reply, view, err := c.Acquire(ctx, request, []*os.File{model}, external, progress)
	if err != nil {
		return err
	}
	a.Outcome = reply.GetOutcome()
	if view == nil {
		return nil
	}
	defer view.Close()
	content, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/%s", view.Fd(), reply.GetGraph()))
	a.Content = string(content)
	return err
}

// classOf names an error as the suite does.
func classOf(err error) string {
	var said *unixsock.Error
	switch {
	case errors.Is(err, unixsock.ErrProtocol):
		return "PROTOCOL"
	case errors.As(err, &said):
		return said.Class.String()
	case errors.Is(err, unixsock.ErrNoDaemon), errors.Is(err, unixsock.ErrConnectionLost):
		return "NO_DAEMON"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return "DEADLINE"
	case errors.Is(err, io.EOF):
		return "EOF"
	}
	return fmt.Sprintf("%T", err)
}
