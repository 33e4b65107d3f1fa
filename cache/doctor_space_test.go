package cache

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
)

// spaceAdvice returns what the doctor says of space with these words; the zero query.Advice where
// it says nothing of the kind.
func (b *bench) spaceAdvice(p request.Peer, words string) query.Advice {
	b.Helper()
	for _, a := range b.cache.Queries.Doctor().SpaceAdvice(p) {
		if strings.Contains(a.Text, words) {
			return a
		}
	}
	return query.Advice{}
}

// Models that are compiled in vain, because their builds exceed the budget, are named with the
// numbers and the setting.
func TestDoctorNamesModelsThatNeverFit(t *testing.T) {
	for name, of := range map[string]struct {
		space store.SpaceOptions
		hint  string
	}{
		"the budget": {store.SpaceOptions{Budget: store.Amount{Bytes: perBuild - 1}},
			"raise budget in [space]"},
		"the quota": {store.SpaceOptions{UserBytes: store.Amount{Bytes: 1}},
			"raise user_bytes in [space]"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBenchWith(t, withSpace(of.space))
			r := b.held(1)
			for range 2 {
				a := b.acquire(r)
				require.True(t, a.Unkept)
				require.NoError(t, a.View.Close())
			}
			b.use(2)
			a := b.spaceAdvice(b.self(),
				"was compiled 2 times in the last 7 days and is not stored: it ")
			require.Equal(t, query.SeverityWarning, a.Severity)
			require.Contains(t, a.Text, "model \"model.onnx\" ")
			require.Contains(t, a.Hint, of.hint)
			if of.space.Budget.Bytes > 0 {
				require.Contains(t, a.Text, "it takes "+bytesize.Text(perBuild+cas.Block)+
					" on disk, and the whole budget is "+bytesize.Text(perBuild-1))
			}
			require.NotZero(t, b.spaceAdvice(b.self(), "compiled once in"))
			require.Zero(t, b.spaceAdvice(request.Peer{UID: stranger}, "is not stored"),
				"models of others are not named")

			require.NoError(t, b.cache.Reload(b.unbounded()))
			require.False(t, b.acquire(r).Unkept)
			require.Zero(t, b.spaceAdvice(b.self(), "compiled 2 times"), "it is kept now")
			b.later.Store(int64(8 * 24 * time.Hour))
			require.Zero(t, b.spaceAdvice(b.self(), "is not stored"))
		})
	}
}

func (b *bench) unbounded() Options {
	o := b.options()
	o.Space = store.SpaceOptions{}
	return o
}
