package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What was found out of a user's builds is believed for a while where it took its time, as long as they are the same ones and as much as was looked for.
func TestWhatMayGoForAUserIsNotLookedForEachTime(t *testing.T) {
	ctx := context.Background()
	b := newBench(t)
	own := func() int64 {
		users, err := b.cache.index.Users(ctx)
		require.NoError(t, err)
		return users[b.cache.uid].LogicalBytes
	}
	first := b.acquire(b.held(1))
	size := own()
	b.use(2)
	next := b.options()
	next.Space.UserBytes = Amount{Bytes: own()}
	require.NoError(t, b.cache.Reload(next))
	r := &reservation{c: b.cache, user: b.cache.uid}
	found := b.cache.usersRoom.of(b.cache.uid)
	believe := func() {
		found.mu.Lock()
		defer found.mu.Unlock()
		require.False(t, found.until.IsZero())
		found.until = time.Now().Add(time.Hour)
	}
	require.Eventually(t, func() bool { return b.cache.sharing.left.Load() == 0 }, soon, time.Millisecond) // what is just read is in no use either way
	look := func(bytes int64) (mayGo int64, stays string) {
		mayGo, stays, err := b.cache.mayGoFor(ctx, r, bytes)
		require.NoError(t, err)
		return mayGo, stays
	}
	_, _ = look(2 * size)
	require.True(t, found.until.IsZero(), "of so few builds nothing is believed")

	b.cache.usersRoom.worth = 1
	mayGo, stays := look(2 * size)
	require.Equal(t, own()-size, mayGo)
	require.Contains(t, stays, "in use")
	believe()
	require.NoError(t, first.View.Close())
	mayGo, _ = look(2 * size)
	require.Equal(t, own()-size, mayGo, "as it was found")

	next.Space.UserBytes = Amount{}
	require.NoError(t, b.cache.Reload(next))
	b.use(3) // another build
	next.Space.UserBytes = Amount{Bytes: own()}
	require.NoError(t, b.cache.Reload(next))
	mayGo, stays = look(1)
	require.Positive(t, mayGo)
	require.Empty(t, stays, "they were looked at anew")
	believe()
	mayGo, _ = look(own())
	require.Equal(t, own(), mayGo, "more was looked for")

	found.mu.Lock()
	found.until = time.Now()
	found.mu.Unlock()
	again := b.acquire(b.held(1))
	require.Equal(t, Hit, again.Outcome)
	mayGo, stays = look(own())
	require.Equal(t, own()-size, mayGo, "it is believed no longer")
	require.NotEmpty(t, stays)
}
