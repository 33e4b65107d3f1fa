package exact

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// slowest counts by looking at every pair of offsets.
func slowest(run int, files [][]byte) (fresh int64) {
	for f, b := range files {
		covered := make([]bool, len(b))
		for at := 0; at+run <= len(b); at++ {
			window := b[at : at+run]
			found := bytes.Contains(b[:at+run-1], window) // one that begins earlier
			for _, before := range files[:f] {
				found = found || bytes.Contains(before, window)
			}
			for i := at; found && i < at+run; i++ {
				covered[i] = true
			}
		}
		for _, c := range covered {
			if !c {
				fresh++
			}
		}
	}
	return fresh
}

func TestMatcherCountsAsTheDefinitionDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		run := rapid.IntRange(1, 9).Draw(t, "run")
		// Few different bytes, so that much is shared, and runs overlap themselves.
		file := rapid.SliceOfN(rapid.ByteRange('a', 'c'), 0, 60)
		files := rapid.SliceOfN(file, 1, 4).Draw(t, "files")
		m := NewMatcher(run, 0)
		var got int64
		for _, b := range files {
			got += m.New(b)
		}
		require.Equal(t, slowest(run, files), got)
	})
}

func TestMatcherGrows(t *testing.T) {
	b := make([]byte, 100_000)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(b) // never fails
	m := NewMatcher(64, 0)
	require.Equal(t, []Range{{0, 100_000}}, m.Add(b))
	second := bytes.Join([][]byte{[]byte("new"), b[50_001:90_000], []byte("and"), b[:63], b[:64]},
		nil)
	require.Equal(t, []Range{{0, 3}, {3 + 39_999, 3 + 63}}, m.Add(second))
}
