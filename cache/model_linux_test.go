package cache

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// However long a model is hashed, its files' age is that of when the reading began.
func TestWitnessIsAsOldAsItsBeginning(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	info, err := r.Graph.Stat()
	require.NoError(t, err)
	cases := map[string]struct {
		began time.Duration // after the file was written
		old   bool
	}{
		"at once":           {0, false},
		"a second later":    {time.Second, false},
		"three seconds":     {3 * time.Second, true},
		"before, by clock":  {-time.Hour, false},
		"a long time later": {time.Hour, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			w, err := b.cache.witness(r, info.ModTime().Add(c.began), true)
			require.NoError(t, err)
			require.Equal(t, c.old, w.old())
			require.NoError(t, w.unchanged())
		})
	}
}
