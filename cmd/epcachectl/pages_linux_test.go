package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// What there is of a long result can be read before the daemon has told the rest.
func TestALongResultIsPrintedAsItComes(t *testing.T) {
	cases := map[string]struct {
		args  []string
		lines int // of the first page
	}{
		"list":        {[]string{"list"}, 2},
		"list --json": {[]string{"list", "--json"}, 3},
		"du --json":   {[]string{"du", "--json"}, 1}, // the model may have further builds on the second
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			read := make(chan struct{})
			b := newStandIn(t)
			b.second = func() error {
				select {
				case <-read:
					return nil
				case <-time.After(2 * time.Minute):
					return errors.New("nobody has read the first page")
				}
			}
			b.serve()
			out, in := io.Pipe()
			ended := make(chan int, 1)
			go func() {
				ended <- run(context.Background(), tc.args, strings.NewReader(""), in, io.Discard)
				_ = in.Close()
			}()
			lines := bufio.NewReader(out)
			for range tc.lines {
				_, err := lines.ReadString('\n')
				require.NoError(t, err)
			}
			close(read)
			_, err := io.Copy(io.Discard, lines)
			require.NoError(t, err)
			require.Equal(t, exitDone, <-ended)
		})
	}
}

// Nobody takes a part of a list for the whole.
func TestAListThatCannotBeHadInFullIsNoList(t *testing.T) {
	b := newStandIn(t)
	b.second = func() error { return errors.New("the index is damaged") }
	b.serve()
	for _, verb := range []string{"list", "du"} {
		r := call(t, verb, "--json")
		require.Equal(t, exitFailed, r.code)
		require.NotEmpty(t, r.out, "the first page")
		require.False(t, json.Valid([]byte(r.out)), r.out)
	}
}

// Later pages are not cut to the widths of the first, and what came before stays as it is.
func TestColumnsOfSeveralPages(t *testing.T) {
	var out bytes.Buffer
	c := columns{p: &printer{out: &out}}
	require.NoError(t, c.print([][]string{{"A", "B", "C"}, {"äöü", "1", ""}}))
	require.NoError(t, c.print(nil))
	require.NoError(t, c.print([][]string{{"longer", "2", "x"}, {"a", "3", "yy"}}))
	require.Equal(t, "A    B  C\näöü  1  \nlonger  2  x\na       3  yy\n", out.String())
}

// A part of a result never stands behind what tells of progress.
func TestProgressGoesBeforeEachPage(t *testing.T) {
	var screen bytes.Buffer
	p := &printer{out: &screen, err: &screen, terminal: true, width: func() int { return 80 }}
	table, array := columns{p: p}, jsonArray{p: p}
	p.progress([]string{"asking"})
	require.NoError(t, table.print([][]string{{"a", "b"}}))
	p.progress([]string{"asking"})
	require.NoError(t, array.add(1))
	require.NoError(t, array.add(2, "x<y"))
	require.NoError(t, array.end())
	require.Equal(t, "asking\r\x1b[Ka  b\nasking\r\x1b[K[\n  1,\n  2,\n  \"x<y\"\n]", screen.String())
}

func TestAnEmptyList(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, (&jsonArray{p: &printer{out: &out}}).end())
	require.Equal(t, "[]", out.String())
}

func TestHowFarTheWholeStoreIs(t *testing.T) {
	p := &wire.Progress{Phase: "reading builds", Detail: "250 of 1000 builds", Done: 250, Total: 1000, ElapsedMs: 3000}
	require.Equal(t, "reading builds  [#####...............]  3s (250 of 1000 builds)", bar("", p, 0))
	p.Done = 2000 // more came meanwhile
	require.Contains(t, bar("", p, 0), "[####################]")
	p.Total = 0
	require.Equal(t, "reading builds  3s (250 of 1000 builds)", bar("", p, 0))
}
