package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
)

func TestMissingDirectoriesAreNoticed(t *testing.T) {
	move := func(from, to string) func(*bench) {
		return func(b *bench) {
			require.NoError(b, os.Rename(filepath.Join(b.state, from), filepath.Join(b.state, to)))
		}
	}
	for name, tc := range map[string]struct {
		remove func(*bench)
		says   string
	}{
		"nothing": {func(*bench) {}, ""},
		"all": {func(b *bench) { require.NoError(b, os.Rename(b.state, b.state+".away")) },
			"the directory no longer exists"},
		"objects":   {move("objects", "gone"), "objects no longer exists"},
		"a part":    {move("objects/incoming", "gone"), "objects/incoming no longer exists"},
		"manifests": {move("manifests", "gone"), "manifests no longer exists"},
		"recipes":   {move("recipes", "gone"), "recipes no longer exists"},
		"lock":      {move("lock", "gone"), "lock no longer exists"},
		"views":     {move("views", "gone"), ""}, // which are made whenever they are needed
		"another's": {func(b *bench) {
			move("lock", "gone")(b)
			require.NoError(b, os.WriteFile(filepath.Join(b.state, "lock"), nil, 0o600))
		}, "another"},
		"the notice": {move("README", "gone"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			tc.remove(b)
			b.cache.Store.CheckStateDirectory()
			b.cache.Store.CheckStateDirectory() // reported once
			if tc.says == "" {
				require.Empty(t, b.cache.Store.ReopenNeeded())
				return
			}
			require.Contains(t, <-b.cache.Store.ReopenNeeded(), tc.says)
			require.Empty(t, b.cache.Store.ReopenNeeded())
			b.cache.Queries.Doctor().StateAdvice()
			advice := b.cache.Queries.Doctor().StateAdvice()
			require.Len(t, advice, 1)
			require.Equal(t, query.SeverityProblem, advice[0].Severity)
			_ = b.cache.Close() // what it would write down has no place
			b.cache = nil
			b.open()
			require.Empty(t, b.cache.Store.MissingPart())
			a := b.acquire(b.request(b.model(1)))
			require.NotContains(t, a.Warnings, "not stored")
			require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
		})
	}
}

// A journal that is deleted under a running daemon is restored, and a withheld build stays
// withheld.
func TestAMarkOutlivesADeletedJournal(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	b.cache.Store.Withhold(a.Build.ID, index.Withheld, "invalidated by request")
	require.NoError(t, os.Remove(filepath.Join(b.state, "journal")))
	b.cache.Store.CheckStateDirectory()
	require.Empty(t, b.cache.Store.ReopenNeeded())
	b.reopen()
	require.Equal(t, index.Withheld, b.cache.index.Journal.StateOf(a.Build.ID).Name)
}

func TestAFailedStoreChecksItsDirectories(t *testing.T) {
	b := newBench(t)
	require.NoError(t, os.Rename(b.state, b.state+".away"))
	a := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Compiled, a.Outcome)
	require.Len(t, b.cache.Store.ReopenNeeded(), 1)
	_ = b.cache.Close() // as above
	b.cache = nil
}
