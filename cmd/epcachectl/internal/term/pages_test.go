package term

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// Later pages are not cut to the widths of the first, and what came before stays as it is.
func TestColumnsOfSeveralPages(t *testing.T) {
	var out bytes.Buffer
	c := NewColumns(&Printer{Out: &out})
	require.NoError(t, c.Print([][]string{{"A", "B", "C"}, {"äöü", "1", ""}}))
	require.NoError(t, c.Print(nil))
	require.NoError(t, c.Print([][]string{{"longer", "2", "x"}, {"a", "3", "yy"}}))
	require.Equal(t, "A    B  C\näöü  1  \nlonger  2  x\na       3  yy\n", out.String())
}

// A part of a result never stands behind a line of progress.
func TestProgressPrecedesEachPage(t *testing.T) {
	var screen bytes.Buffer
	p := &Printer{Out: &screen, Err: &screen, Terminal: true, width: func() int { return 80 }}
	table, array := NewColumns(p), NewArray(p, "")
	p.progress([]string{"asking"})
	require.NoError(t, table.Print([][]string{{"a", "b"}}))
	p.progress([]string{"asking"})
	require.NoError(t, array.Add(1))
	require.NoError(t, array.Add(2, "x<y"))
	require.NoError(t, array.End())
	require.Equal(t, "asking\r\x1b[Ka  b\nasking\r\x1b[K[\n  1,\n  2,\n  \"x<y\"\n]",
		screen.String())
}

func TestAnEmptyList(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, NewArray(&Printer{Out: &out}, "").End())
	require.Equal(t, "[]", out.String())
}

func TestProgressThroughTheWholeStore(t *testing.T) {
	p := &wire.Progress{Phase: "reading builds", Detail: "250 of 1000 builds", Done: 250,
		Total: 1000, ElapsedMs: 3000}
	require.Equal(t, "reading builds  [#####...............]  3s (250 of 1000 builds)",
		bar("", p, 0, 1000))
	p.Done = 2000 // more came meanwhile
	require.Contains(t, bar("", p, 0, 1000), "[####################]")
	p.Total = 0
	require.Equal(t, "reading builds  3s (250 of 1000 builds)", bar("", p, 0, 1000))
}
