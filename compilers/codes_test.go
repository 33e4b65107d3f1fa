package compilers

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCodeName(t *testing.T) {
	require.Equal(t, "10 INVALID_GRAPH", CodeName(10))
	require.Equal(t, "11 EP_FAIL", CodeName(11))
	require.Equal(t, "13 MODEL_REQUIRES_COMPILATION", CodeName(13))
	require.Equal(t, "code 15", CodeName(15))
	require.Equal(t, "a crash", CodeName(-1))
}
