package upkeep

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLossNeedsAClearMargin(t *testing.T) {
	for name, c := range map[string]struct {
		g     Gain
		loses bool
	}{
		"not measured":           {Gain{}, false},
		"faster":                 {Gain{Load: 1, SourceLoad: 2}, false},
		"as good":                {Gain{Load: 1.2, SourceLoad: 1}, false},
		"slower":                 {Gain{Load: 1.3, SourceLoad: 1}, true},
		"slower by milliseconds": {Gain{Load: 0.009, SourceLoad: 0.002}, false},
	} {
		require.Equal(t, c.loses, c.g.IsLoss(), name)
	}
}
