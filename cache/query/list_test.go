package query

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A prefix too short to name a key is answered with the length needed, and other names are not.
func TestANameThatMeansNothingHasAHint(t *testing.T) {
	require.Contains(t, hintOf("0123abc"), "at least 8 digits")
	for _, name := range []string{"", "0123abcd", "model_0", "ABCDEF1"} {
		require.NotContains(t, hintOf(name), "digits", name)
		require.Contains(t, hintOf(name), "epcachectl list")
	}
}
