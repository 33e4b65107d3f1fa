package rights

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLimiter(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	l := &Limiter{Burst: 3, Interval: 2 * time.Second, Now: func() time.Time { return now }}
	for range 3 {
		_, ok := l.Allow(7)
		require.True(t, ok)
	}
	wait, ok := l.Allow(7)
	require.False(t, ok)
	require.Equal(t, 2*time.Second, wait)
	now = now.Add(2 * time.Second)
	_, ok = l.Allow(7)
	require.True(t, ok)
	_, ok = l.Allow(7)
	require.False(t, ok)
	now = now.Add(-time.Hour)
	_, ok = l.Allow(7)
	require.False(t, ok, "a clock that goes back gives nothing")
	now = now.Add(2 * time.Hour)
	for range 3 {
		_, ok = l.Allow(7)
		require.True(t, ok)
	}

	for user := range uint32(maxLimited) {
		l.Allow(100 + user)
	}
	require.LessOrEqual(t, len(l.tokens), maxLimited)
	now = now.Add(time.Hour)
	_, ok = l.Allow(1_000_000)
	require.True(t, ok, "who has all again is forgotten")
	require.Len(t, l.tokens, 1)
}

func TestOwners(t *testing.T) {
	byName := func(name string) (uint32, bool) { return 1000, name == "alice" }
	text := "alice:100000:65536\n# a " +
		"comment\nbroken\n:1\nbob:1:1\n1001:231072:65536\n5:x:1\n6:1:-3\n"
	require.Equal(t, []uidRange{{1000, 100_000, 65_536}, {1001, 231_072, 65_536}},
		parseSubuid([]byte(text), byName))

	o := Owners{Path: filepath.Join(t.TempDir(), "subuid")}
	require.EqualValues(t, 100_000, o.OwnerOf(100_000), "there is no such file")
	require.NoError(t, os.WriteFile(o.Path, []byte("1001:100000:10\n"), 0o644))
	for uid, want := range map[uint32]uint32{99_999: 99_999, 100_000: 1001, 100_009: 1001,
		100_010: 100_010, 65_534: 65_534} {
		require.Equal(t, want, o.OwnerOf(uid))
	}
	require.NoError(t, os.WriteFile(o.Path, []byte("1002:100000:10\n"), 0o644))
	require.NoError(t, os.Chtimes(o.Path, time.Time{}, time.Now().Add(time.Minute)))
	require.EqualValues(t, 1002, o.OwnerOf(100_000))
}
