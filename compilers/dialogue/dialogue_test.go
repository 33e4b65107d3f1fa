package dialogue_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/stretchr/testify/require"
)

func TestRequestArrives(t *testing.T) {
	sent := dialogue.Request{Do: dialogue.Compile, Model: "/a\nb.onnx",
		EPs: []dialogue.EP{{Name: "X", Options: map[string]string{"k": "ü\x00"}}}}
	var pipe bytes.Buffer
	require.NoError(t, dialogue.WriteRequest(&pipe, sent))
	got, err := dialogue.ReadRequest(bufio.NewReader(&pipe))
	require.NoError(t, err)
	sent.Version = dialogue.Version
	require.Equal(t, sent, got)
}

// The Python client starts workers too.
func TestPythonSpeaksThisVersion(t *testing.T) {
	source, err := os.ReadFile("../../clients/python/epcache/_worker.py")
	require.NoError(t, err)
	require.Contains(t, string(source),
		fmt.Sprintf("\nVERSION = %d  # of the dialogue\n", dialogue.Version))
}

func TestRequestIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"other version": `{"Version":99}` + "\n",
		"no version":    "{}\n",
		"not json":      "hello\n",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := dialogue.ReadRequest(bufio.NewReader(strings.NewReader(text)))
			require.ErrorIs(t, err, dialogue.ErrMalformed)
		})
	}
	// no line feed: cut off
	_, err := dialogue.ReadRequest(
		bufio.NewReader(strings.NewReader(fmt.Sprintf(`{"Version":%d}`, dialogue.Version))))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestTheWorkerIsToldToGoOn(t *testing.T) {
	var pipe bytes.Buffer
	require.NoError(t,
		dialogue.WriteRequest(&pipe, dialogue.Request{Do: dialogue.Compile, Waits: true}))
	require.NoError(t, dialogue.WriteGo(&pipe))
	lines := bufio.NewReader(&pipe)
	got, err := dialogue.ReadRequest(lines)
	require.NoError(t, err)
	require.True(t, got.Waits)
	require.NoError(t, dialogue.ReadGo(lines))
	require.ErrorIs(t, dialogue.ReadGo(lines), io.ErrUnexpectedEOF, "the caller gave up")
	require.ErrorIs(t, dialogue.ReadGo(bufio.NewReader(strings.NewReader("{}\n"))),
		dialogue.ErrMalformed)
}

func TestEventsEndWithTheAnswer(t *testing.T) {
	var pipe bytes.Buffer
	for _, e := range []dialogue.Event{{Phase: "a"}, {Phase: "b"},
		{Result: &dialogue.Result{ORTVersion: "1"}}, {Phase: "after the end"}} {
		require.NoError(t, dialogue.WriteEvent(&pipe, e))
	}
	var phases []string
	last, err := dialogue.ReadEvents(&pipe,
		func(e dialogue.Event) { phases = append(phases, e.Phase) })
	require.NoError(t, err)
	require.Equal(t, "1", last.Result.ORTVersion)
	require.Equal(t, []string{"a", "b"}, phases)
}

func TestEndWithoutAnAnswer(t *testing.T) {
	_, err := dialogue.ReadEvents(strings.NewReader(`{"Phase":"a"}`+"\n"), func(dialogue.Event) {})
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
			_, err := dialogue.ReadEvents(source, func(dialogue.Event) {})
			require.ErrorIs(t, err, dialogue.ErrMalformed)
			require.Less(t, source.read, 2*dialogue.MaxEvent)
		})
	}
}
