package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// An asker is an application of a test, in a process of its own: this test binary, started with its
// order in the environment. It connects, says "ready", and asks for the model when it reads a line.
// It says each phase, and at last what it got as JSON.
const askerEnvironment = "EPCACHED_TEST_ASK"

type order struct {
	Socket, Model string
	Unread        bool // the files that it gets are not read
}

// told is the answer that an asker got.
type told struct {
	Outcome, Build, RequestKey, Error string
	// their digests, by name, which are those of the bytes in the view where these are read
	Files map[string]string
	At    time.Time // when the answer was there
}

// runAsker is the asker's main function; it returns the exit status.
func runAsker(text string) int {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	got, err := o.acquire()
	if err != nil {
		got.Error = err.Error()
	}
	line, err := json.Marshal(got)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	fmt.Printf("got %s\n", line)
	return 0
}

func (o order) acquire() (told, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := unixsock.Dial(ctx, o.Socket)
	if err != nil {
		return told{}, err
	}
	defer c.Close()
	f, err := os.Open(o.Model)
	if err != nil {
		return told{}, err
	}
	defer f.Close()
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return told{}, err
	}
	reply, view, err := c.Acquire(ctx, forModel(o.Model), []*os.File{f}, nil,
		func(p *wire.Progress) { fmt.Println("phase", p.Phase) })
	if err != nil {
		return told{}, err
	}
	defer view.Close()
	a := lease{reply, view}
	got := told{Outcome: reply.Outcome, Build: reply.Build, RequestKey: reply.RequestKey,
		Files: a.names(), At: time.Now()}
	if o.Unread {
		return got, nil
	}
	return got, a.wrong()
}

// asker is the test's end of one.
type asker struct {
	testing.TB
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string // closed at the end of its output
}

func (d *epcached) asker(model string) *asker {
	d.Helper()
	return d.askerFor(order{Socket: d.socket, Model: model})
}

func (d *epcached) askerFor(o order) *asker {
	d.Helper()
	text, err := json.Marshal(o)
	require.NoError(d, err)
	a := startSelf(d.TB, askerEnvironment+"="+string(text))
	a.until("ready")
	return a
}

// startSelf starts this test binary with a variable in the environment that says what it is to do.
// The process ends with the test.
func startSelf(t testing.TB, variable string) *asker {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	a := &asker{TB: t, cmd: exec.Command(self), lines: make(chan string, 100)}
	a.cmd.Env = append(os.Environ(), variable)
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // as another user's processes have
	a.cmd.Stderr = os.Stderr
	a.stdin, err = a.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := a.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, a.cmd.Start())
	go func() {
		defer close(a.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			a.lines <- s.Text()
		}
	}()
	t.Cleanup(func() {
		_ = a.cmd.Process.Kill() // it has ended by itself, or the test has failed
		for range a.lines {
		}
		_ = a.cmd.Wait() // as killed, or as before
	})
	return a
}

// begin lets it ask.
func (a *asker) begin() {
	a.Helper()
	_, err := io.WriteString(a.stdin, "\n")
	require.NoError(a, err)
}

// until waits for a line that begins so, and gives the rest of it.
func (a *asker) until(prefix string) string {
	a.Helper()
	limit := time.After(patience)
	for {
		select {
		case line, ok := <-a.lines:
			require.True(a, ok, "the asker ended without saying %q", prefix)
			if rest, found := strings.CutPrefix(line, prefix); found {
				return rest
			}
		case <-limit:
			require.Fail(a, "the asker does not say "+prefix)
		}
	}
}

// got waits for the answer.
func (a *asker) got() told {
	a.Helper()
	var out told
	require.NoError(a, json.Unmarshal([]byte(a.until("got ")), &out))
	return out
}
