package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

// The beginning of a long result is printed before the daemon has sent the rest.
func TestALongResultIsPrintedAsItComes(t *testing.T) {
	cases := map[string]struct {
		args  []string
		lines int // of the first page
	}{
		"list":        {[]string{"list"}, 2},
		"list --json": {[]string{"list", "--json"}, 3},
		// the model may have further builds on the second
		"du --json": {[]string{"du", "--json"}, 1},
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
			require.Equal(t, exit.Done, <-ended)
		})
	}
}

// A list that breaks off is not taken for the whole.
func TestAListThatCannotBeHadInFullIsNoList(t *testing.T) {
	b := newStandIn(t)
	b.second = func() error { return errors.New("the index is damaged") }
	b.serve()
	for _, verb := range []string{"list", "du"} {
		r := call(t, verb, "--json")
		require.Equal(t, exit.Failed, r.code)
		require.NotEmpty(t, r.out, "the first page")
		require.False(t, json.Valid([]byte(r.out)), r.out)
	}
}
