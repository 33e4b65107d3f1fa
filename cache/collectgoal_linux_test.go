package cache

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/unixsock/wire"
)

// No build is evicted if exactly the requested space is free.
func TestEvictionStopsJustAtTheGoal(t *testing.T) {
	b, _ := stored(t, 2)
	plan := b.plan(0)
	require.Len(t, plan.Steps, 2)
	plan.Goal = plan.Used - plan.Steps[0].Frees // as if space had been freed since
	b.collect(plan)
	require.Equal(t, []string{"removed", "kept: enough space is free by now"},
		[]string{plan.Steps[0].Outcome, plan.Steps[1].Outcome})
	require.Zero(t, plan.Short)
	require.Len(t, b.list(), 1)
}

// A blob that another user's build needs too is not packed, because that user would pay for the
// space that this one frees.
func TestUsersDoNotPackSharedBlobs(t *testing.T) {
	b := newBench(t)
	other := request.Peer{UID: b.cache.uid + 1}
	own := b.variant(2)
	own.Peer, own.Store = other, "user"
	builds, _ := b.stores([]*request.Request{b.variant(1), own, b.variant(2)})
	require.Equal(t, large(builds[1]), large(builds[2]), "two builds of the same bytes")
	require.NotEqual(t, builds[1].Scope, builds[2].Scope)
	b.allowPacking()
	b.later.Add(int64(24 * time.Hour))
	to := int64(0)
	shrinks := func(p request.Peer) bool {
		plan, err := b.cache.PlanCollection(context.Background(), p, store.Goal{Bytes: &to}, nil)
		require.NoError(t, err)
		to = max(plan.Used-1, 0)
		plan, err = b.cache.PlanCollection(context.Background(), p, store.Goal{Bytes: &to}, nil)
		require.NoError(t, err)
		return slices.ContainsFunc(plan.Steps,
			func(s evict.Step) bool { return s.Action != evict.Evict })
	}
	require.True(t, shrinks(b.self()), "who administers the store may have it packed")
	require.False(t, shrinks(other))
	require.Positive(t, b.pack(builds[2]))
	a := b.acquire(b.variant(2)) // now there is a copy
	require.NoError(t, a.View.Close())
	b.later.Add(int64(24 * time.Hour))
	require.True(t, shrinks(b.self()))
	require.False(t, shrinks(other))
}

// watched calls a function whenever the context is asked whether it is over.
type watched struct {
	context.Context //nolint:containedctx // it is one
	asked           func()
}

func (w watched) Err() error { w.asked(); return w.Context.Err() }

// A leftover that is removed before the check ends is not reported; one that stays is.
func TestCheckIgnoresLeftoversRemovedMeanwhile(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	var left []cas.Digest
	hold := b.cache.cas.Hold() // against the daemon, which removes leftovers by itself
	defer hold.Release()
	for _, content := range []string{"one", "another"} {
		d, _, err := hold.Put(ctx, bytes.NewReader([]byte(content)))
		require.NoError(t, err)
		left = append(left, d)
	}
	slices.SortFunc(left, func(a, b cas.Digest) int { return bytes.Compare(a[:], b[:]) })
	asked, at := 0, 0
	check := func() (found []string) {
		asked = 0
		result, err := b.cache.Check(watched{ctx, func() {
			if asked++; asked == at {
				require.NoError(t, b.cache.cas.Remove(left[0]))
			}
		}}, b.self(), &wire.Check{}, nil)
		require.NoError(t, err)
		for _, f := range result.Findings {
			found = append(found, f.Kind+" "+f.Object)
		}
		return found
	}
	all := []string{"leftover " + left[0].String(), "leftover " + left[1].String()}
	require.ElementsMatch(t, all, check())
	var found []string
	for b.cache.cas.Has(left[0]) { // a check may ask less often than the one before
		at = asked // the last time, when the first was found already
		found = check()
	}
	require.Equal(t, all[1:], found)
}
