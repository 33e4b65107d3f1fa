package cache

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
)

// Concurrent requests for a packed build wait for one copy, and get its progress.
func TestUnpackedOnceForAll(t *testing.T) {
	b, _, files := packedPair(t)
	var wg sync.WaitGroup
	answers := make([]*request.Answer, 8)
	reports := make([]request.Progress, len(answers))
	for i := range answers {
		r := b.variant(2)
		wg.Go(func() {
			a, err := b.cache.Acquire(context.Background(), r, func(p request.Progress) {
				if p.Phase == lookup.Unpacking && p.Total > 0 {
					reports[i] = p
				}
			})
			if err == nil {
				answers[i] = a
			}
		})
	}
	wg.Wait()
	counted := 0
	for i, a := range answers {
		require.NotNil(t, a)
		defer a.View.Close()
		require.Equal(t, answers[0].Graph, a.Graph)
		require.Equal(t, files[1], b.read(a))
		if reports[i].Total > 0 {
			counted++
			require.Equal(t, reports[i].Total, reports[i].Done)
		}
	}
	require.Equal(t, 1, counted, "one writes, the others wait")
}

// A build that is packed again and again while it is requested is served every time.
func TestPackedWhileItIsAskedFor(t *testing.T) {
	b := newBench(t)
	builds, files := b.similar(2)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			b.later.Add(int64(time.Hour))
			if _, err := b.cache.Store.Packer().
				PackBuild(context.Background(), builds[1].ID); err != nil {
				requireInUse(t, err)
			}
			if _, err := b.cache.Store.Packer().DropCopies(builds[1].ID); err != nil {
				requireInUse(t, err)
			}
			if i%3 == 0 {
				for d := range builds[1].DistinctBlobs() {
					if err := b.cache.packing.MakeWhole(context.Background(), d); err != nil {
						t.Error(err)
					}
				}
			}
		}
	})
	for range 60 {
		a, err := lookup.Lease(context.Background(), b.cache.Store, builds[1], func(string) {})
		require.NoError(t, err)
		require.Equal(t, files[1], b.read(a))
		require.NoError(t, a.View.Close())
	}
	close(stop)
	wg.Wait()
	b.requireSound()
}

func requireInUse(t *testing.T, err error) {
	if !strings.Contains(err.Error(), packing.ErrInUse.Error()) {
		t.Error(err)
	}
}

// A copy is reserved within the budget while it is written. If space is short unused copies are
// removed first. If all are in use, the request is refused, and the error names those in use.
func TestAnUnpackedFormHasAPlace(t *testing.T) {
	b := newBench(t)
	builds, files := b.similar(3)
	for _, build := range builds {
		b.pack(build)
		_, err := b.cache.Pin(context.Background(), b.self(), []string{build.BuildKey.String()},
			false)
		require.NoError(t, err)
	}
	size, _, err := b.cache.index.BlobBytes(large(builds[1]))
	require.NoError(t, err)
	reserved := b.reserved
	copies := func() int64 {
		packed, err := b.cache.packing.Space(true)
		require.NoError(t, err)
		return packed.Copies
	}
	take := func(batch int) *request.Answer {
		most := int64(0)
		a, err := b.cache.Acquire(context.Background(), b.variant(batch), func(p request.Progress) {
			if p.Phase == lookup.Unpacking && p.Total > 0 {
				most = max(most, reserved())
			}
		})
		require.NoError(t, err)
		require.Equal(t, request.Hit, a.Outcome)
		require.Equal(t, files[batch-1], b.read(a))
		require.GreaterOrEqual(t, most, size)
		require.Zero(t, reserved())
		return a
	}
	require.NoError(t, take(2).View.Close())
	require.Equal(t, cas.RoundUpToBlock(size), copies())
	now, err := b.cache.Store.Account()
	require.NoError(t, err)
	b.change = func(o *Options) { o.Space.Budget = store.Amount{Bytes: now.Counted() - 1} }
	b.reopen()
	b.later.Add(int64(time.Hour))
	held := take(3)
	require.Equal(t, cas.RoundUpToBlock(size), copies(), "the one that nobody uses went")
	refused := b.refused(b.variant(2))
	require.Equal(t, apierr.NoSpace, refused.Class)
	require.Regexp(t,
		`it is stored packed, and there is no space to unpack it: .* it takes 1\.0 MiB on disk; `+
			`of the budget of .*; remaining: 3 builds of .*: pinned`, refused.Text)
	require.Equal(t, cas.RoundUpToBlock(size), copies(), "nothing goes above")
	require.Zero(t, reserved())
	_, err = b.cache.Unpack(context.Background(), b.self(), []string{builds[1].BuildKey.String()},
		false, false, nil)
	require.Equal(t, apierr.NoSpace, apierr.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "of the budget of")
	require.NoError(t, held.View.Close())
	b.later.Add(int64(time.Hour)) // it was given out by path as well
	require.NoError(t, take(2).View.Close())
	require.Equal(t, cas.RoundUpToBlock(size), copies(), "the one that was in use is gone")
}

// While a request is answered with a build, neither its copy nor its whole file is removed, because
// only the new view would have the bytes then, in no account.
func TestBlobsBeingServedKeepTheirRepresentation(t *testing.T) {
	b := newBench(t)
	builds, _ := b.similar(3)
	require.Positive(t, b.pack(builds[1]))
	require.NoError(t, b.acquire(b.variant(2)).View.Close())
	b.later.Add(int64(time.Hour))
	copied, whole := large(builds[1]), large(builds[2])
	for _, i := range []int{1, 2} {
		done, err := b.cache.Store.BeginServing(builds[i].ID)
		require.NoError(t, err)
		defer done()
	}
	require.ErrorIs(t, b.cache.packing.DropCopy(copied), packing.ErrInUse)
	_, _, disk := b.cache.packing.Bytes(copied)
	require.Positive(t, disk)
	freed, err := b.cache.packing.Pack(context.Background(), whole, packing.Worth, nil)
	require.NoError(t, err)
	require.Zero(t, freed)
	require.True(t, b.cache.cas.Has(whole))
}
