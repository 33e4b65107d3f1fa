package backend

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Readings of one user rest if many wait and other users are served.
func TestReadingsOfAFloodRest(t *testing.T) {
	many := 2 * runtime.GOMAXPROCS(0)
	for name, c := range map[string]struct {
		crowded bool
		waiting int
		rests   bool
	}{
		"a flood":               {true, many, true},
		"a flood without users": {false, many, false},
		"some models":           {true, many - 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGates(func() bool { return c.crowded })
				leave, err := g.large.Take(t.Context(), 1)
				require.NoError(t, err)
				began := time.Now()
				others := make(chan time.Duration, c.waiting) // when each of the others began
				for range c.waiting {
					go func() {
						leave, err := g.large.Take(t.Context(), 1)
						if err == nil {
							others <- time.Since(began)
							leave()
						}
					}()
				}
				synctest.Wait()
				time.Sleep(time.Second)
				leave()
				time.Sleep(time.Hour)
				next := <-others
				require.Equal(t, c.rests, next > time.Second)
				require.LessOrEqual(t, next, 2*time.Second, "a slow disk does not count in full")
			})
		})
	}
}
