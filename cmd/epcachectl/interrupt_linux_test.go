package main

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

func TestInterruptedGetReportsTheJob(t *testing.T) {
	for name, c := range map[string]struct {
		args     []string
		progress *wire.Progress
		signal   syscall.Signal
		status   int
		says     []string
	}{
		"nobody else waits": {nil,
			&wire.Progress{Phase: "compiling", Job: "0123456789abcdef", Waiting: 1}, syscall.SIGINT,
			130,
			[]string{"interrupted (compiling): the compile is cancelled",
				"hint: --keep-going finishes it"}},
		"other callers wait": {nil,
			&wire.Progress{Phase: "compiling", Job: "0123456789abcdef", Waiting: 3}, syscall.SIGINT,
			130,
			[]string{"interrupted (compiling): the compile continues because other",
				"hint: wait for it: epcachectl jobs follow 0123456789ab"}},
		"kept": {[]string{"--keep-going"},
			&wire.Progress{Phase: "queued", Job: "0123456789abcdef", Waiting: 1}, syscall.SIGINT,
			130,
			[]string{"interrupted (queued): the compile continues because of --keep-going",
				"epcachectl jobs follow 0123456789ab"}},
		"nothing compiled yet": {nil, &wire.Progress{Phase: "reading"}, syscall.SIGTERM, 143,
			[]string{"terminated (reading)\n"}},
		"out of time": {[]string{"--timeout", "1s"},
			&wire.Progress{Phase: "compiling", Job: "0123456789abcdef", Waiting: 2}, 0, 1,
			[]string{"no result within 1s (compiling): the compile continues",
				"hint: allow more time with --timeout; wait for it: epcachectl jobs follow " +
					"0123456789ab"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newStandIn(t)
			b.hold, b.progress = make(chan struct{}), c.progress
			b.serve()
			model := tinyModel(t, "m.onnx")
			cmd := exec.Command(os.Args[0],
				append([]string{"get", ep, "--progress", model}, c.args...)...)
			cmd.Env = append(os.Environ(), asProgram+"=1")
			pipe, err := cmd.StderrPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			said := bufio.NewReader(pipe)
			first, err := said.ReadString('\n')
			require.NoError(t, err)
			require.Contains(t, first, c.progress.Phase)
			if c.signal != 0 {
				require.NoError(t, cmd.Process.Signal(c.signal))
			}
			var rest bytes.Buffer
			_, err = rest.ReadFrom(said)
			require.NoError(t, err)
			_ = cmd.Wait() // the status says it
			require.Equal(t, c.status, cmd.ProcessState.ExitCode())
			require.Contains(t, rest.String(), `get "`+model+`": `+c.says[0])
			for _, says := range c.says {
				require.Contains(t, rest.String(), says)
			}
			require.NotContains(t, strings.ToLower(rest.String()), "context")
		})
	}
}
