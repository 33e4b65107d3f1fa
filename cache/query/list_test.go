package query

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Who gives less of a key than names something hears how much is needed, and nobody else does.
func TestANameThatMeansNothingHasAHint(t *testing.T) {
	require.Contains(t, hintOf("0123abc"), "at least 8 digits")
	for _, name := range []string{"", "0123abcd", "model_0", "ABCDEF1"} {
		require.NotContains(t, hintOf(name), "digits", name)
		require.Contains(t, hintOf(name), "epcachectl list")
	}
}
