package compilers

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLookUpUser(t *testing.T) {
	root, err := LookUpUser("root")
	require.NoError(t, err)
	require.EqualValues(t, 0, root.UID)
	both, err := LookUpUser("65534:65533")
	require.NoError(t, err)
	require.Equal(t, []uint32{65534, 65533}, []uint32{both.UID, both.GID})
	for text, says := range map[string]string{"no-such-user": "unknown user",
		"4000000001": "give a group as well", "root:no-such-group": "unknown group"} {
		_, err := LookUpUser(text)
		require.ErrorContains(t, err, says)
	}
}
