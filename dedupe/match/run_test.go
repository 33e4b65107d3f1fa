package match

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRunsOf(t *testing.T) {
	noise := randomBytes(51, 64<<10)
	period := func(n int) []byte {
		return append([]byte("0123456789abcdef")[:n:n],
			noise[:max(n-16, 0)]...)
	}
	for name, c := range map[string]struct {
		period []byte
		want   int64
	}{
		"zeros":       {[]byte{0}, 1},
		"a pair":      {[]byte{1, 2}, 2},
		"a float":     {[]byte{1, 2, 3, 4}, 4},
		"a word":      {[]byte("12345678"), 8},
		"three":       {[]byte("123"), 3},
		"a nibble's":  {period(16)[:15], 15},
		"one of 1000": {bytes.Join([][]byte{[]byte("start"), make([]byte, 995)}, nil), 1000},
	} {
		t.Run(name, func(t *testing.T) {
			body := bytes.Repeat(c.period, 20_000/len(c.period)+1)
			b := bytes.Join([][]byte{noise[:7001], body, noise[7001:]}, nil)
			runs := runsOf(b, 1<<40, 1024, nil)
			require.NotEmpty(t, runs)
			r := runs[0]
			require.Equal(t, c.want, r.period)
			require.Equal(t, run{1<<40 + 7001, int64(len(body)), c.want}, r)
		})
	}
	require.Empty(t, runsOf(noise, 0, 1024, nil), "random bytes repeat nothing")
}

func TestRunsOfAnEdgeAreKeptHoweverShort(t *testing.T) {
	noise := randomBytes(52, 4000)
	require.Equal(t, []run{{0, 100, 1}}, runsOf(append(make([]byte, 100), noise...), 0, 1024, nil))
}
