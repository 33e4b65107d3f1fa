package term

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

func TestBar(t *testing.T) {
	cases := map[string]struct {
		p    *wire.Progress
		age  time.Duration
		want string
	}{
		"nothing to measure by": {&wire.Progress{Phase: "compiling", ElapsedMs: 3000},
			2 * time.Second, "compiling  m  5s"},
		"estimate": {&wire.Progress{Phase: "compiling", ElapsedMs: 10_000,
			EstimateMs: 40_000}, 0, "compiling  m  [#####...............]  10s of about 40s"},
		"age counts": {&wire.Progress{Phase: "compiling", ElapsedMs: 10_000,
			EstimateMs: 40_000}, 10 * time.Second,
			"compiling  m  [##########..........]  20s of about 40s"},
		"longer than usual": {&wire.Progress{Phase: "compiling", ElapsedMs: 90_000,
			EstimateMs: 40_000}, 0, "compiling  m  [###################.]  1m30s, usually 40s"},
		"bytes": {&wire.Progress{Phase: "reading", DoneBytes: 512,
			TotalBytes: 1024}, 0, "reading    m  [##########..........]  0s (512 B of 1.0 KiB)"},
		"bytes of one of several": {&wire.Progress{Phase: "exporting", DoneBytes: 512,
			TotalBytes: 1024, Detail: "build 2 of 3"}, 0,
			"exporting  m  [##########..........]  0s (512 B of 1.0 KiB, build 2 of 3)"},
		"bytes beyond the end": {&wire.Progress{Phase: "reading", DoneBytes: 4096,
			TotalBytes: 1024}, 0, "reading    m  [####################]  0s (4.0 KiB of 1.0 KiB)"},
		"negative bytes": {&wire.Progress{Phase: "reading", DoneBytes: -4096,
			TotalBytes: 1024}, 0, "reading    m  [....................]  0s (-4096 B of 1.0 KiB)"},
		"time that runs backwards": {&wire.Progress{Phase: "compiling", ElapsedMs: -5000,
			EstimateMs: 1000}, 0, "compiling  m  [....................]  0s of about 1s"},
		"other callers wait": {&wire.Progress{Phase: "queued", Waiting: 3, Detail: "2 before it"},
			0,
			"queued     m  0s (2 before it, 3 waiting for it)"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, bar("m", tc.p, tc.age, 1000)) })
	}
}

// The progress display is erased before anything else is printed.
func TestProgressOnATerminal(t *testing.T) {
	var out, err bytes.Buffer
	p := &Printer{Out: &out, Err: &err, Terminal: true, width: func() int { return 12 }}
	p.progress([]string{"one", "a line that is too long"})
	require.Equal(t, "one\na line that", err.String())
	err.Reset()
	p.progress([]string{"three"})
	require.Equal(t, "\r\x1b[K\x1b[1A\x1b[Kthree", err.String())
	err.Reset()
	p.Line("result")
	require.Equal(t, "\r\x1b[K", err.String())
	require.Equal(t, "result\n", out.String())
	err.Reset()
	p.Clear()
	require.Empty(t, err.String(), "nothing is left")
}

func TestLinesOfPhases(t *testing.T) {
	s := NewPhases(&Printer{}, false, 3)
	require.Len(t, s.lines(s.Start), 2)
	require.Equal(t, "waiting for the daemon  0s", s.lines(s.Start)[0])
	s.Phase("a", &wire.Progress{Phase: "reading"})
	s.Phase("b", &wire.Progress{Phase: "compiling"})
	s.Phase("a", &wire.Progress{Phase: "compiling"})
	lines := s.lines(s.Start)
	require.Equal(t, "compiling  a  0s", lines[0], "each model keeps its place")
	require.Equal(t, "compiling  b  0s", lines[1])
	require.Equal(t, "0 of 3 done  0s", lines[2])
	s.Done("a", false)
	lines = s.lines(s.Start)
	require.Len(t, lines, 2)
	require.Equal(t, "1 of 3 done  0s", lines[1])
}
