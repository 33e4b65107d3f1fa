package cache

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// BenchmarkMayGoForAUser is what it takes to find out whether others of a user's builds may go for
// one more, in a store of 100,000 builds: where all are the user's, where ten are, and where all
// are in use.
func BenchmarkMayGoForAUser(b *testing.B) {
	ctx := context.Background()
	m := newMultitude(b, filepath.Join(memoryDir(b), "many"), 100_000, 1)
	m.open()
	m.waitUntilIdle()
	first := m.acquire(m.ask(0))
	require.NoError(b, first.View.Close())
	const few = 10
	for i := range few {
		one := *first.Build
		one.ID, one.RequestKey, one.UID = index.BuildID{byte(25 * i), 1},
			index.RequestKey{byte(i), 1}, stranger
		m.publish(&one)
	}
	for _, c := range []struct {
		name  string
		uid   uint32
		inUse bool
	}{{"all are the user's", m.cache.uid, false}, {"ten are the user's", stranger, false},
		{"all are in use", m.cache.uid, true}} {
		b.Run(c.name, func(b *testing.B) {
			users, err := m.cache.index.Users(ctx)
			require.NoError(b, err)
			size := users[c.uid].LogicalBytes / int64(users[c.uid].Builds)
			next := m.options()
			next.Space.UserBytes = store.Amount{Bytes: users[c.uid].LogicalBytes}
			require.NoError(b, m.cache.Reload(next))
			if c.inUse {
				err := m.cache.index.EachBrief(ctx, index.BuildID{}, func(one *index.Brief) error {
					_, err := m.cache.Store.BeginServing(one.ID)
					return err
				})
				require.NoError(b, err)
			}
			r := m.cache.Store.Unreserved(c.uid)
			for b.Loop() {
				mayGo, _, err := m.cache.Store.Collector().EvictableFor(ctx, r, size, size)
				require.NoError(b, err)
				require.Equal(b, c.inUse, mayGo == 0)
			}
		})
	}
}
