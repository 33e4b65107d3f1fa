package cache

import (
	"context"
	"math"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
)

// similarBuilds is similar where the collector may pack, and nothing else does.
func (b *bench) similarBuilds(n int) (builds []*index.Build, files []map[string]string) {
	builds, files = b.similar(n)
	b.allowPacking()
	return builds, files
}

func (b *bench) allowPacking() {
	o := b.options()
	o.Pack, o.PackAfter = store.PackCold, math.MaxInt64
	require.NoError(b, b.cache.Reload(o))
}

// actions are the steps of a plan in their order: what is done to which build.
func actions(plan *store.Collection, builds []*index.Build) (out []string) {
	for _, s := range plan.Steps {
		for i, b := range builds {
			if s.ID == b.ID {
				out = append(out, s.Action.String()+" "+string(rune('a'+i)))
			}
		}
	}
	return out
}

// Under pressure a build is packed before one is evicted, the coldest first, and what is freed is
// what was promised.
func TestPackingComesBeforeEvicting(t *testing.T) {
	b := newBench(t)
	builds, files := b.similarBuilds(3)
	later := b.acquire(b.variant(2)) // so the third is colder
	require.NoError(t, later.View.Close())
	b.later.Add(int64(time.Hour))
	b.exact()

	plan := b.plan(b.plan(0).Used - 1)
	require.Equal(t, []string{"pack c"}, actions(plan, builds))
	require.Greater(t, plan.Steps[0].Frees, int64(900<<10))
	require.Contains(t, plan.Steps[0].Reason(), "other builds have most of its bytes")
	require.False(t, b.cache.packing.OnlyPacked(large(builds[2])), "a plan changes nothing")

	plan = b.plan(plan.Used - plan.Freed - 1)
	require.Equal(t, []string{"pack c", "pack b"}, actions(plan, builds))
	promised := []int64{plan.Steps[0].Frees, plan.Steps[1].Frees}
	b.collect(plan)
	require.Equal(t, []string{"packed", "packed"}, outcomes(plan, builds[2].ID, builds[1].ID))
	require.Equal(t, promised, []int64{plan.Steps[0].Frees, plan.Steps[1].Frees})
	require.Equal(t, promised[0]+promised[1], plan.Freed)
	require.Equal(t, plan.Used-plan.Freed, b.plan(0).Used, "what was freed is free")
	b.exact()
	for i := range builds {
		a := b.acquire(b.variant(i + 1))
		require.Equal(t, request.Hit, a.Outcome)
		require.Equal(t, files[i], b.read(a))
		require.NoError(t, a.View.Close())
	}
	b.later.Add(int64(time.Hour))

	// Now there are copies: they go first.
	plan = b.plan(b.plan(0).Used - 1)
	require.Equal(t, []string{"drop copy b"}, actions(plan, builds), "used before the other")
	before := b.account().Packed
	b.collect(plan)
	require.Equal(t, "dropped", plan.Steps[0].Outcome)
	require.Equal(t, before.Copies-plan.Freed, b.account().Packed.Copies,
		"at once, or more would go")
	require.Equal(t, plan.Used-plan.Freed, b.plan(0).Used)
	b.exact()
	plan = b.plan(0)
	require.Equal(t, []string{"remove a", "remove b", "remove c"},
		slices.Sorted(slices.Values(actions(plan, builds))),
		"what goes in the end is not packed before")
	require.Equal(t, plan.Used, plan.Freed)
	b.collect(plan)
	require.Empty(t, b.list())
	require.Equal(t, plan.Used, plan.Freed, "recipes and bases go as well")
	left, err := b.cache.objectBytes(context.Background())
	require.NoError(t, err)
	require.Zero(t, left)
	require.EqualValues(t, 3, b.compiler.Compiles.Load())
}

// Evicting a build that recipes take from frees no space, so it is not evicted.
func TestEvictionSkipsBuildsThatFreeNothing(t *testing.T) {
	b := newBench(t)
	ask := func(batch int) *request.Request { // all that there is of such a build is one file
		r := b.variant(batch)
		r.Embed = true
		return r
	}
	builds, _ := b.stores([]*request.Request{ask(1), ask(2), ask(3)})
	b.allowPacking()
	b.later.Add(int64(30 * 7 * 24 * time.Hour))
	for _, batch := range []int{2, 3} { // so that the first pays least
		a := b.acquire(ask(batch))
		require.NoError(t, a.View.Close())
		b.later.Add(int64(time.Hour))
	}
	b.collect(b.plan(b.plan(0).Used * 2 / 3))
	require.True(t, b.cache.packing.OnlyPacked(large(builds[1])) &&
		b.cache.packing.OnlyPacked(large(builds[2])))
	plan := b.plan(b.plan(0).Used - 1)
	require.Len(t, plan.Steps, 1)
	require.Equal(t, evict.Evict, plan.Steps[0].Action)
	require.NotEqual(t, builds[0].ID, plan.Steps[0].ID)
	require.Positive(t, plan.Steps[0].Frees)
	b.collect(plan)
	require.Len(t, b.list(), 2)
	b.exact()
}

func TestPackingSkipsLeasedAndRequestedBuilds(t *testing.T) {
	b := newBench(t)
	builds, _ := b.similarBuilds(3)
	held := b.acquire(b.variant(2))
	b.later.Add(int64(time.Hour)) // the lease alone keeps it
	all := b.plan(0).Used
	plan := b.plan(all - 1<<19)
	require.Equal(t, []string{"pack c"}, actions(plan, builds))
	r := b.variant(3)
	r.KeepsView = true
	a := b.acquire(r)
	require.NoError(t, a.View.Close())
	b.collect(plan)
	require.Equal(t, "kept: used after the plan was made", plan.Steps[0].Outcome)
	require.False(t, b.cache.packing.OnlyPacked(large(builds[2])))

	// One that comes while it is compared with others ends that.
	plan = b.plan(all - 1<<19)
	require.Equal(t, []string{"pack c"}, actions(plan, builds))
	gate := b.cache.Store.Collector().UntilUsed(&store.Collection{}, &plan.Steps[0])
	require.NoError(t, gate(context.Background()))
	b.later.Add(int64(time.Second))
	a = b.acquire(r)
	require.NoError(t, a.View.Close())
	require.ErrorIs(t, gate(context.Background()), packing.ErrInUse)
	require.NoError(t, held.View.Close())
}

func TestPackingCanBeSwitchedOff(t *testing.T) {
	b := newBench(t)
	builds, _ := b.similar(2)
	plan := b.plan(b.plan(0).Used - 1)
	require.Len(t, plan.Steps, 1)
	require.Equal(t, evict.Evict, plan.Steps[0].Action)
	require.Len(t, builds, 2)
}

// noRoomFor is a file system that refuses new blobs with its error, if it has one.
type noRoomFor struct {
	cas.OS
	err atomic.Pointer[syscall.Errno]
}

func (f *noRoomFor) Create(path string) (*os.File, error) {
	if err := f.err.Load(); err != nil && strings.Contains(path, "/objects/incoming/") {
		return nil, &os.PathError{Op: "open", Path: path, Err: *err}
	}
	return f.OS.Create(path)
}

// If the disk is full, or the file system's quota of the daemon's user, a build stays unpacked, and
// the error is not an internal one.
func TestPackingNeedsFreeSpace(t *testing.T) {
	for _, full := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT} {
		t.Run(full.Error(), func(t *testing.T) {
			f := &noRoomFor{}
			b := newBenchWith(t, func(o *Options) { o.fs = f })
			builds, files := b.similarBuilds(2)
			plan := b.plan(b.plan(0).Used - 1)
			require.Equal(t, []string{"pack b"}, actions(plan, builds))
			f.err.Store(&full)
			b.collect(plan)
			f.err.Store(nil)
			require.Equal(t, store.KeptNoSpace, plan.Steps[0].KeptReason())
			a := b.acquire(b.variant(2))
			require.Equal(t, request.Hit, a.Outcome)
			require.Equal(t, files[1], b.read(a))
			require.Equal(t, apierr.NoSpace, request.StoreClass(full))
		})
	}
}
