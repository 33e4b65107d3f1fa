package workerproto_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/epcached/epcached/compilers/workerproto"
	"github.com/stretchr/testify/require"
)

func TestRequestArrives(t *testing.T) {
	sent := workerproto.Request{Do: workerproto.Compile, Model: "/a\nb.onnx",
		EPs: []workerproto.EP{{Name: "X", Options: map[string]string{"k": "ü\x00"}}}}
	var pipe bytes.Buffer
	require.NoError(t, workerproto.WriteRequest(&pipe, sent))
	got, err := workerproto.ReadRequest(bufio.NewReader(&pipe))
	require.NoError(t, err)
	sent.Version = workerproto.Version
	require.Equal(t, sent, got)
}

// The Python client starts workers too.
func TestPythonSpeaksThisVersion(t *testing.T) {
	source, err := os.ReadFile("../../clients/python/epcache/_worker.py")
	require.NoError(t, err)
	version := regexp.MustCompile(`(?m)^VERSION = (\d+)`).FindSubmatch(source)
	require.NotNil(t, version)
	require.Equal(t, strconv.Itoa(workerproto.Version), string(version[1]))
}

func TestRequestIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"other version": `{"Version":99}` + "\n",
		"no version":    "{}\n",
		"not json":      "hello\n",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := workerproto.ReadRequest(bufio.NewReader(strings.NewReader(text)))
			require.ErrorIs(t, err, workerproto.ErrMalformed)
		})
	}
	// no line feed: cut off
	_, err := workerproto.ReadRequest(
		bufio.NewReader(strings.NewReader(fmt.Sprintf(`{"Version":%d}`, workerproto.Version))))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestTheWorkerIsToldToGoOn(t *testing.T) {
	var pipe bytes.Buffer
	require.NoError(t,
		workerproto.WriteRequest(&pipe, workerproto.Request{Do: workerproto.Compile, Waits: true}))
	require.NoError(t, workerproto.WriteGo(&pipe))
	lines := bufio.NewReader(&pipe)
	got, err := workerproto.ReadRequest(lines)
	require.NoError(t, err)
	require.True(t, got.Waits)
	require.NoError(t, workerproto.ReadGo(lines))
	require.ErrorIs(t, workerproto.ReadGo(lines), io.ErrUnexpectedEOF, "the caller gave up")
	require.ErrorIs(t, workerproto.ReadGo(bufio.NewReader(strings.NewReader("{}\n"))),
		workerproto.ErrMalformed)
}

func TestEventsEndWithTheAnswer(t *testing.T) {
	var pipe bytes.Buffer
	for _, e := range []workerproto.Event{{Phase: "a"}, {Phase: "b"},
		{Result: &workerproto.Result{ORTVersion: "1"}}, {Phase: "after the end"}} {
		require.NoError(t, workerproto.WriteEvent(&pipe, e))
	}
	var phases []string
	last, err := workerproto.ReadEvents(&pipe,
		func(e workerproto.Event) { phases = append(phases, e.Phase) })
	require.NoError(t, err)
	require.Equal(t, "1", last.Result.ORTVersion)
	require.Equal(t, []string{"a", "b"}, phases)
}

func TestEndWithoutAnAnswer(t *testing.T) {
	_, err := workerproto.ReadEvents(strings.NewReader(`{"Phase":"a"}`+"\n"),
		func(workerproto.Event) {})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

// endless gives the same text for ever, and counts.
type endless struct {
	text string
	read int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, strings.Repeat(e.text, len(p)/len(e.text)))
	e.read += n
	return n, nil
}

func TestEndlessInputIsBounded(t *testing.T) {
	for name, source := range map[string]*endless{"one line": {text: "x"},
		"many events": {text: "{}\n"}} {
		t.Run(name, func(t *testing.T) {
			_, err := workerproto.ReadEvents(source, func(workerproto.Event) {})
			require.ErrorIs(t, err, workerproto.ErrMalformed)
			require.Less(t, source.read, 2*workerproto.MaxEvent)
		})
	}
}
