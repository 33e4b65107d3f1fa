package cache

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

func TestDoubtsAreBounded(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	ds := newDoubts(func() time.Time { return now })
	id := func(n int) *index.Build { return &index.Build{ID: index.BuildID{byte(n >> 8), byte(n), 1}} }
	for n := range doubtsPerUser {
		require.True(t, ds.add(id(n), 7, 7, "why", true))
	}
	require.False(t, ds.add(id(doubtsPerUser), 8, 7, "why", true), "another uid of the same owner")
	require.True(t, ds.add(id(3), 7, 7, "another reason", true), "again is no more")
	require.True(t, ds.add(id(doubtsPerUser), 9, 9, "why", true), "another owner")
	require.Equal(t, "another reason", ds.holds(id(3).ID, 7))
	require.Empty(t, ds.holds(id(3).ID, 9))
	require.Equal(t, 1, ds.owners(id(3).ID))

	now = now.Add(doubtHolds + time.Second)
	require.Empty(t, ds.holds(id(3).ID, 7))
	require.Zero(t, ds.owners(id(3).ID))
	require.True(t, ds.add(id(doubtsPerUser), 7, 7, "why", true), "what is over makes room")
	require.EqualValues(t, 1, ds.any.Load())
	ds.settle(id(doubtsPerUser).ID)
	require.Zero(t, ds.any.Load())
	require.Empty(t, ds.known)
}

// A build that loads with one user's runtime may still not load with another's, who then keeps getting another; but what
// was tried here is not for users to vote on.
func TestAnAnswerToOneUserLeavesTheDoubtsOfOthers(t *testing.T) {
	ds := newDoubts(time.Now)
	b := &index.Build{ID: index.BuildID{1}}
	for uid := range uint32(3) {
		require.True(t, ds.add(b, uid, uid, "why", true))
	}
	ds.answer(b.ID, 1)
	require.Empty(t, ds.holds(b.ID, 1))
	require.Equal(t, "why", ds.holds(b.ID, 2))
	require.Zero(t, ds.owners(b.ID))
	require.EqualValues(t, 2, ds.any.Load())
}

func TestLimiter(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	l := &limiter{burst: 3, interval: 2 * time.Second, now: func() time.Time { return now }}
	for range 3 {
		_, ok := l.take(7)
		require.True(t, ok)
	}
	wait, ok := l.take(7)
	require.False(t, ok)
	require.Equal(t, 2*time.Second, wait)
	now = now.Add(2 * time.Second)
	_, ok = l.take(7)
	require.True(t, ok)
	_, ok = l.take(7)
	require.False(t, ok)
	now = now.Add(-time.Hour)
	_, ok = l.take(7)
	require.False(t, ok, "a clock that goes back gives nothing")
	now = now.Add(2 * time.Hour)
	for range 3 {
		_, ok = l.take(7)
		require.True(t, ok)
	}

	for user := range uint32(maxLimited) {
		l.take(100 + user)
	}
	require.LessOrEqual(t, len(l.left), maxLimited)
	now = now.Add(time.Hour)
	_, ok = l.take(1_000_000)
	require.True(t, ok, "who has all again is forgotten")
	require.Len(t, l.left, 1)
}

func TestOwners(t *testing.T) {
	byName := func(name string) (uint32, bool) { return 1000, name == "alice" }
	text := "alice:100000:65536\n# a comment\nbroken\n:1\nbob:1:1\n1001:231072:65536\n5:x:1\n6:1:-3\n"
	require.Equal(t, []uidRange{{1000, 100_000, 65_536}, {1001, 231_072, 65_536}}, parseSubuid([]byte(text), byName))

	o := owners{path: filepath.Join(t.TempDir(), "subuid")}
	require.EqualValues(t, 100_000, o.of(100_000), "there is no such file")
	require.NoError(t, os.WriteFile(o.path, []byte("1001:100000:10\n"), 0o644))
	for uid, want := range map[uint32]uint32{99_999: 99_999, 100_000: 1001, 100_009: 1001, 100_010: 100_010, 65_534: 65_534} {
		require.Equal(t, want, o.of(uid))
	}
	require.NoError(t, os.WriteFile(o.path, []byte("1002:100000:10\n"), 0o644))
	require.NoError(t, os.Chtimes(o.path, time.Time{}, time.Now().Add(time.Minute)))
	require.EqualValues(t, 1002, o.of(100_000))
}
