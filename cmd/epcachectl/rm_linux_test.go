package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock/wire"
)

// terminal returns both ends of a pseudo terminal.
func terminal(t *testing.T) (person, program *os.File) {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("NOT TESTED ON A TERMINAL: %v", err)
	}
	t.Cleanup(func() { person.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(person.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(person.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { program.Close() })
	return person, program
}

func TestRmAsksBeforeItDeletesSeveral(t *testing.T) {
	b := newStandIn(t)
	one, two := b.build(), b.build()
	two.Build, two.ModelName = "abcdef0123456789", "other.onnx"
	b.builds = []*wire.Build{one, two}
	b.serve()
	runWithAnswer := func(answer string, args ...string) (code int, out, said string) {
		person, program := terminal(t)
		_, err := person.WriteString(answer)
		require.NoError(t, err)
		var stdout, stderr bytes.Buffer
		a := &cli.Call{Print: term.NewPrinter(&stdout, &stderr), Stdin: program}
		a.Print.Terminal = true
		code = execute(context.Background(), a, args)
		return code, stdout.String(), stderr.String()
	}
	code, out, said := runWithAnswer("n\n", "rm", "tiny.onnx")
	require.Equal(t, exit.Failed, code)
	require.Empty(t, out)
	for _, says := range []string{"  tiny.onnx: build cdcdcdcdcdcd of StandInExecutionProvider",
		"  other.onnx: build abcdef012345", "delete 2 builds, 7 B on the disk? [y/N]",
		"nothing deleted", "hint: delete without confirmation: epcachectl rm tiny.onnx --yes"} {
		require.Contains(t, said, says)
	}
	require.Empty(t, b.changed())
	code, out, _ = runWithAnswer("y\n", "rm", "tiny.onnx")
	require.Equal(t, exit.Done, code)
	require.Contains(t, out, "deleted other.onnx: build abcdef012345")
	require.Equal(t, []string{"remove tiny.onnx"}, b.changed())
	code, _, said = runWithAnswer("", "rm", "-f", "tiny.onnx")
	require.Equal(t, exit.Done, code)
	require.NotContains(t, said, "[y/N]")
	pinned := b.build()
	pinned.Pinned = true
	b.set(func() { b.builds = []*wire.Build{pinned} })
	_, out, said = runWithAnswer("y\n", "rm", "tiny.onnx")
	require.Contains(t, strings.Join(strings.Fields(said), " "),
		"cdcdcdcdcdcd of StandInExecutionProvider, pinned, ")
	require.Contains(t, out, "cdcdcdcdcdcd of StandInExecutionProvider, pinned\n")
	b.set(func() { b.builds = []*wire.Build{b.build()} })
	code, _, said = runWithAnswer("", "rm", "tiny.onnx")
	require.Equal(t, exit.Done, code)
	require.NotContains(t, said, "[y/N]", "one build is what was named")
}
