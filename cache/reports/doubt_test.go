package reports

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

func TestDoubtsAreBounded(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	ds := newUserWithholds(func() time.Time { return now })
	id := func(n int) *index.Build {
		return &index.Build{ID: index.BuildID{byte(n >> 8), byte(n),
			1}}
	}
	for n := range withholdsPerUser {
		require.True(t, ds.add(id(n), 7, 7, "why", true))
	}
	require.False(t, ds.add(id(withholdsPerUser), 8, 7, "why", true),
		"another uid of the same owner")
	require.True(t, ds.add(id(3), 7, 7, "another reason", true), "again is no more")
	require.True(t, ds.add(id(withholdsPerUser), 9, 9, "why", true), "another owner")
	require.Equal(t, "another reason", ds.reasonFor(id(3).ID, 7))
	require.Empty(t, ds.reasonFor(id(3).ID, 9))
	require.Equal(t, 1, ds.owners(id(3).ID))

	now = now.Add(WithholdTime + time.Second)
	require.Empty(t, ds.reasonFor(id(3).ID, 7))
	require.Zero(t, ds.owners(id(3).ID))
	require.True(t, ds.add(id(withholdsPerUser), 7, 7, "why", true), "what is over makes room")
	require.EqualValues(t, 1, ds.total.Load())
	ds.endForAll(id(withholdsPerUser).ID)
	require.Zero(t, ds.total.Load())
	require.Empty(t, ds.known)
}

// A build that loads with one user's runtime may still not load with another's, so that user keeps
// getting another build; but after a trial here users' reports no longer count towards the quorum.
func TestAnAnswerToOneUserLeavesTheDoubtsOfOthers(t *testing.T) {
	ds := newUserWithholds(time.Now)
	b := &index.Build{ID: index.BuildID{1}}
	for uid := range uint32(3) {
		require.True(t, ds.add(b, uid, uid, "why", true))
	}
	ds.endForUser(b.ID, 1)
	require.Empty(t, ds.reasonFor(b.ID, 1))
	require.Equal(t, "why", ds.reasonFor(b.ID, 2))
	require.Zero(t, ds.owners(b.ID))
	require.EqualValues(t, 2, ds.total.Load())
}
