package reports

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

func TestDoubtsAreBounded(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	until := now.Add(WithholdTime)
	ds := newUserWithholds(func() time.Time { return now }, nil)
	id := func(n int) *index.Build {
		return &index.Build{ID: index.BuildID{byte(n >> 8), byte(n),
			1}}
	}
	for n := range withholdsPerUser {
		require.True(t, ds.add(id(n), 7, 7, "why", until))
	}
	require.False(t, ds.add(id(withholdsPerUser), 8, 7, "why", until),
		"another uid of the same owner")
	require.True(t, ds.add(id(3), 7, 7, "another reason", until), "again is no more")
	require.True(t, ds.add(id(withholdsPerUser), 9, 9, "why", until), "another owner")
	why, decided := ds.reasonFor(id(3).ID, 7)
	require.Equal(t, "another reason", why)
	require.True(t, decided)
	why, _ = ds.reasonFor(id(3).ID, 9)
	require.Empty(t, why)

	now = until.Add(time.Second)
	why, _ = ds.reasonFor(id(3).ID, 7)
	require.Empty(t, why)
	require.True(t, ds.add(id(withholdsPerUser), 7, 7, "why", now.Add(WithholdTime)),
		"what is over makes room")
	require.EqualValues(t, 1, ds.total.Load())
	ds.endForAll(id(withholdsPerUser).ID)
	require.Zero(t, ds.total.Load())
	require.Empty(t, ds.known)
}
