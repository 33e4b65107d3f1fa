package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func event(sequence uint64, at time.Time, text string) *wire.Event {
	return &wire.Event{Sequence: sequence, AtMs: at.UnixMilli(), Kind: "compiled",
		Model: "tiny.onnx", Build: strings.Repeat("cd", 32), Text: text}
}

func TestEvents(t *testing.T) {
	b := newStandIn(t)
	at := time.Date(2026, 11, 21, 14, 30, 0, 0, time.Local)
	b.past = []*wire.Event{
		{AtMs: at.UnixMilli(), Kind: "changed", Runtime: "/opt/ort", Text: "QNN 2.6.0 -> 2.7.0"},
		event(4, at.Add(time.Hour), "in 2 s"),
	}
	b.serve()
	r := call(t, "events")
	require.Equal(t,
		result{exit.Done, halfPast(14) + "  changed        /opt/ort  QNN 2.6.0 -> 2.7.0\n" +
			halfPast(15) + "  compiled       tiny.onnx  build cdcdcdcdcdcd  in 2 s\n", ""}, r)
	require.Equal(t, 1, strings.Count(call(t, "events", "--since", "2026-11-21 15:00").out, "\n"))
	require.Equal(t, 1, strings.Count(call(t, "events", "--limit", "1").out, "\n"))
	require.Empty(t, call(t, "events", "--since", at.Add(24*time.Hour).Format(time.RFC3339)).out)

	lines := strings.Split(strings.TrimSpace(call(t, "events", "--json").out), "\n")
	require.Len(t, lines, 2)
	var one map[string]any
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &one))
	require.ElementsMatch(t,
		[]string{"at", "sequence", "kind", "request_key", "build", "model", "runtime", "text"},
		keysOf(one))
	require.Equal(t, at.Add(time.Hour).UTC().Format(time.RFC3339), one["at"])
}

func TestSince(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.FixedZone("here", 3600))
	cases := map[string]string{
		"2h": "2026-11-21T10:00:00+01:00", "3d": "2026-11-18T12:00:00+01:00",
		"1d12h":      "2026-11-20T00:00:00+01:00",
		"2026-11-20": "2026-11-20T00:00:00+01:00", "2026-11-20 08:00": "2026-11-20T08:00:00+01:00",
		"2026-11-20T08:00:00Z": "2026-11-20T08:00:00Z",
		"11:30":                "2026-11-21T11:30:00+01:00", "14:30": "2026-11-20T14:30:00+01:00",
		"12:00": "2026-11-21T12:00:00+01:00",
	}
	for text, want := range cases {
		got, err := parseSince(text, now)
		require.NoError(t, err, text)
		require.Equal(t, want, got.Format(time.RFC3339), text)
	}
	for _, text := range []string{"", "yesterday", "2026-13-01", "25:00", "-2h", "3"} {
		_, err := parseSince(text, now)
		require.ErrorContains(t, err, "--since", text)
	}
	require.Equal(t, exit.BadUsage, call(t, "events", "--since", "whenever").code)
}

// stream is an output that tests wait on.
type stream struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *stream) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *stream) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

func (s *stream) waitFor(t *testing.T, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(s.String(), text) }, 2*time.Minute,
		time.Millisecond, "waiting for %q", text)
}

// following runs events --follow until stop, which gives the exit code.
func following(t *testing.T, args ...string) (out, errs *stream, stop func() int) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	out, errs = &stream{}, &stream{}
	code := make(chan int, 1)
	go func() {
		code <- run(ctx, append([]string{"events", "--follow"}, args...), strings.NewReader(""),
			out, errs)
	}()
	return out, errs, func() int { cancel(); return <-code }
}

func TestFollow(t *testing.T) {
	b := newStandIn(t)
	start := time.Now()
	b.past = []*wire.Event{event(1, start.Add(-time.Hour), "long ago"),
		event(2, start.Add(-time.Minute), "just before")}
	b.serve()
	out, errs, stop := following(t, "--since", "10m")
	out.waitFor(t, "just before")
	b.listened(1)
	b.happen(event(3, time.Now(), "now"))
	out.waitFor(t, "now")
	b.listened(2) // it asked again, and printed nothing twice
	b.happen(event(4, time.Now(), "last"))
	out.waitFor(t, "last")
	require.Equal(t, exit.Done, stop(), "to be interrupted is how it ends")
	require.Equal(t, 3, strings.Count(out.String(), "\n"), out.String())
	require.NotContains(t, out.String(), "long ago")
	require.Empty(t, errs.String())
}

// Events that were lost on the way show as a gap in the numbers, and are looked up.
func TestFollowFillsGaps(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	out, _, stop := following(t)
	b.listened(2)
	b.happen(event(5, time.Now(), "one"))
	out.waitFor(t, "one")
	b.set(func() { b.lossy = true })
	b.happen(event(6, time.Now(), "two"))
	b.set(func() { b.lossy = false })
	b.happen(event(7, time.Now(), "three"))
	out.waitFor(t, "three")
	require.Equal(t, exit.Done, stop())
	require.Regexp(t, `(?s)^[^\n]*one\n[^\n]*two\n[^\n]*three\n$`, out.String())
}

// A restarted daemon numbers new events from the start, and has no earlier ones.
func TestFollowOverARestart(t *testing.T) {
	b := newStandIn(t)
	dir, err := os.MkdirTemp("", "ectl")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	path := dir + "/s"
	t.Setenv(unixsock.SocketVariable, path)
	l, err := unixsock.Listen(path, 0o600)
	require.NoError(t, err)
	kill := b.serveOn(l)
	defer kill()
	out, errs, stop := following(t)
	b.listened(2)
	b.happen(event(1, time.Now(), "before"))
	out.waitFor(t, "before")
	kill()
	errs.waitFor(t, "the connection to the daemon was lost; waiting for the daemon\n")
	b.set(func() {
		before := proto.CloneOf(b.past[0])
		before.Sequence = 0
		b.past = []*wire.Event{before, event(0, time.Now(), "in between")}
	})
	l, err = unixsock.Listen(path, 0o600)
	require.NoError(t, err)
	defer b.serveOn(l)()
	out.waitFor(t, "in between")
	b.listened(4)
	b.happen(event(1, time.Now(), "after"))
	out.waitFor(t, "after")
	require.Equal(t, exit.Done, stop())
	require.Regexp(t, `(?s)^[^\n]*before\n[^\n]*in between\n[^\n]*after\n$`, out.String())
	require.Equal(t,
		"epcachectl: the connection to the daemon was lost; waiting for the daemon\nepcachectl: "+
			"the daemon is back\n",
		errs.String())
}

// A reader such as head closes its end of the pipe, and no event follows.
func TestFollowEndsWhenItsReaderIsGone(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	in, out, err := os.Pipe()
	require.NoError(t, err)
	defer out.Close()
	code := make(chan int, 1)
	go func() {
		code <- run(t.Context(), []string{"events", "--follow"}, strings.NewReader(""), out,
			&stream{})
	}()
	b.listened(2)
	require.Empty(t, code)
	require.NoError(t, in.Close())
	select {
	case got := <-code:
		require.Equal(t, exit.Done, got)
	case <-time.After(time.Minute):
		t.Fatal("it still follows")
	}
}

func TestFollowRefused(t *testing.T) {
	b := newStandIn(t)
	b.err = &unixsock.Error{Class: wire.ErrorClass_NOT_ALLOWED, Text: "not yours"}
	b.serve()
	r := call(t, "events", "--follow")
	require.Equal(t, exit.NotAllowed, r.code)
	require.Equal(t, "epcachectl: not yours\n", r.err)
	require.Equal(t, exit.NoDaemon,
		call(t, "--socket", fmt.Sprintf("%s/none", t.TempDir()), "events", "-f", "--wait=0").code)
}

// A daemon that is killed breaks the connection; one that stops says that it is busy; neither is a
// refusal.
func TestInterrupted(t *testing.T) {
	for _, err := range []error{unixsock.ErrConnectionLost, unixsock.ErrBusy, unixsock.ErrNoDaemon,
		fmt.Errorf("x: %w", unixsock.ErrConnectionLost)} {
		require.True(t, daemon.IsConnectionLost(err), err)
	}
	for _, err := range []error{nil, unixsock.ErrNotAllowed, unixsock.ErrVersion,
		context.Canceled} {
		require.False(t, daemon.IsConnectionLost(err), err)
	}
}
