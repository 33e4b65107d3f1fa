package remotes

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/remote"
)

// A look-up may take a quarter of the compile that it may save, so that a remote which is far away
// is asked for long compiles, and one that does not answer costs short ones 0.3 s at most.
func TestALookUpFollowsTheEstimateOfTheCompile(t *testing.T) {
	r := &Remote{LoseAtMost: DefaultLoss}
	for estimate, want := range map[time.Duration]time.Duration{
		0:                      300 * time.Millisecond, // not known
		400 * time.Millisecond: 100 * time.Millisecond,
		time.Second:            250 * time.Millisecond,
		4 * time.Second:        time.Second,
		time.Hour:              remote.DefaultConnect,
	} {
		require.Equal(t, want, (&Ask{Estimate: estimate}).lookBudget(r), estimate)
	}
	set := &Remote{Config: remote.Config{Connect: 5 * time.Second}, LoseAtMost: DefaultLoss}
	require.Equal(t, 5*time.Second, (&Ask{}).lookBudget(set))
}
