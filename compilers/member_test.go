package compilers

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// The number of a model comes from the worker, and so from whatever runs in it.
func TestErrorsNameExistingMembersOnly(t *testing.T) {
	cause := errors.New("it failed")
	for member, known := range map[int]bool{-1: false, 0: true, 1: true, 2: false, 1 << 30: false} {
		var of *MemberError
		require.Equal(t, known, errors.As(memberError(member, 2, cause), &of),
			"model %d of 2", member)
	}
}
