package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cas/crashfs"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// crashBench is a bench with a store that may stop at any step of an operation. It has builds of
// models with the same weights.
type crashBench struct {
	*bench
	fs     *crashfs.FS
	models []string // what was built, by paths
	builds []*index.Build
	files  []map[string]string

	evicts int    // of the first builds: these may be gone, with tombstones
	end    func() // removes it, once it is no longer needed: there are hundreds
}

// asks makes models of sizes; 1: that of 512, with its weights twice.
func (b *bench) asks(sizes []int) (out []*request.Request) {
	for i, n := range sizes {
		if n == 1 {
			out = append(out, b.repeated(2))
			continue
		}
		out = append(out, b.dense(n, i+1))
	}
	return out
}

// onCrashFS makes the store once, and a copy of it for each call of the function that it returns.
func onCrashFS(t *testing.T, sizes []int,
	prepare func(b *bench, builds []*index.Build)) func(t *testing.T) *crashBench {
	origin := newBench(t)
	asks := origin.asks(sizes)
	builds, files := origin.stores(asks)
	var models []string
	for _, r := range asks {
		models = append(models, r.Graph.Name())
	}
	if prepare != nil {
		prepare(origin, builds)
	}
	again := origin.copies()
	return func(t *testing.T) *crashBench {
		b := again(t)
		fs, err := crashfs.New(filepath.Dir(b.state))
		require.NoError(t, err)
		b.change = func(o *Options) { o.fs = fs }
		b.open()
		c := &crashBench{bench: b, fs: fs, models: models, builds: builds, files: files}
		c.end = sync.OnceFunc(func() {
			_ = b.cache.Close() // of a machine that has stopped
			require.NoError(t, errors.Join(fs.Close(), os.RemoveAll(filepath.Dir(b.state))))
		})
		t.Cleanup(c.end)
		return c
	}
}

// requireAfterCrash opens what a crash has left: every build that was there is served as it was,
// without compiling, and a check finds nothing but leftovers.
func (b *crashBench) requireAfterCrash(losses ...crashfs.Loss) {
	b.Helper()
	for i, loss := range losses {
		root := memoryDir(b)
		require.NoError(b, b.fs.Crash(root, loss, uint64(b.fs.Steps()+i)))
		after := &bench{TB: b, compiler: b.compiler, state: filepath.Join(root, "state"),
			runtime: b.runtime, change: func(o *Options) { o.fs = crashfs.Sparse{} }}
		after.later.Store(b.later.Load() + int64(time.Hour))
		after.open()
		result, err := after.cache.Check(context.Background(), after.self(),
			&wire.Check{Deep: true}, nil)
		require.NoError(b, err)
		for _, f := range result.Findings {
			require.Equal(b, "leftover", f.Kind, "%v", f)
		}
		require.NoError(b,
			after.cache.packing.Recipes.Walk(context.Background(),
				func(d cas.Digest, p dedupe.Packed) error {
					for _, base := range p.Bases {
						require.True(b, after.cache.cas.Has(base.Digest),
							"a base of %s, which may be needed again, is gone", d)
					}
					return nil
				}))
		for v, path := range b.models {
			if _, err := after.cache.index.Get(b.builds[v].ID); err != nil {
				require.Less(b, v, max(b.evicts, 1), "only the first were retracted")
				if b.evicts > 0 {
					require.Len(b,
						after.cache.index.Journal.Tombstones(
							func(g *index.Tombstone) bool { return g.BuildID == b.builds[v].ID }),
						1, "and nothing says why")
				}
				continue
			}
			r := after.request(after.openFile(path))
			r.OnMiss = request.Fail
			a := after.acquire(r)
			require.Equal(b, request.Hit, a.Outcome)
			require.Equal(b, b.files[v], after.read(a))
			require.NoError(b, a.View.Close())
		}
		require.NoError(b, after.cache.Store.RemoveLeftovers(context.Background()))
		result, err = after.cache.Check(context.Background(), after.self(), &wire.Check{}, nil)
		require.NoError(b, err)
		require.Empty(b, result.Findings)
		after.close()
		require.NoError(b, os.RemoveAll(root))
	}
}

// requireHeld requires, while the store is open, that each listed build can be served.
func (b *crashBench) requireHeld() {
	b.Helper()
	for _, build := range b.builds {
		if _, err := b.cache.index.Get(build.ID); err == nil {
			require.NoError(b, b.cache.packing.Check(context.Background(), large(build)))
		}
	}
}

// evict removes the first builds together, of those of them that are there.
func (b *crashBench) evict(n int) error {
	b.evicts = n
	ctx, to := context.Background(), int64(0)
	plan, err := b.cache.PlanCollection(ctx, b.self(), store.Goal{Bytes: &to, Urgent: true}, nil)
	if err != nil {
		return err
	}
	plan.Steps = slices.DeleteFunc(plan.Steps, func(s evict.Step) bool {
		return !slices.ContainsFunc(b.builds[:n],
			func(build *index.Build) bool { return build.ID == s.ID })
	})
	return b.cache.Store.Collector().Collect(ctx, plan, func(int64, int64) {})
}

// packing, and each thing that is done with what is packed, may be stopped, or fail, at any step.
func TestStopAtEveryStepOfPacking(t *testing.T) {
	ctx := context.Background()
	pack := func(b *bench, builds []*index.Build) {
		_, err := b.cache.Store.Packer().PackBuild(ctx, builds[1].ID)
		require.NoError(b, err)
	}
	alike := []int{512, 512}
	cases := []struct {
		name    string
		sizes   []int
		prepare func(b *bench, builds []*index.Build)
		run     func(b *crashBench) error
		every   int // so many steps it is tried; odd, so that both errors come up
	}{
		{"pack", alike, nil,
			func(b *crashBench) error {
				_, err := b.cache.Store.Packer().
					PackBuild(ctx, b.builds[1].ID)
				return err
			}, 1},
		{"pack a base", []int{1, 300}, pack,
			func(b *crashBench) error {
				_, err := b.cache.Store.Packer().
					PackBuild(ctx, b.builds[0].ID)
				return err
			}, 3},
		{"make a base whole", []int{1, 300}, func(b *bench, builds []*index.Build) {
			pack(b, builds)
			_, err := b.cache.Store.Packer().PackBuild(ctx, builds[0].ID)
			require.NoError(b, err)
		}, func(b *crashBench) error { return b.cache.packing.MakeWhole(ctx, large(b.builds[0])) },
			3},
		{"compact what no build needs", []int{640, 300, 300},
			func(b *bench, builds []*index.Build) {
				pack(b, builds)
				_, err := b.cache.Store.Packer().PackBuild(ctx, builds[2].ID)
				require.NoError(b, err)
				require.NoError(b, b.remove(builds[0]))
			}, func(b *crashBench) error {
				return b.cache.packing.Compact(ctx, packing.Family{Base: large(b.builds[0])}, nil)
			}, 3},
		{"evict what is packed with its base", []int{320, 320}, pack,
			func(b *crashBench) error { return b.evict(2) }, 7},
		{"unpack", alike, pack, func(b *crashBench) error {
			a, err := lookup.Lease(ctx, b.cache.Store, b.builds[1], func(string) {})
			if err == nil {
				err = a.View.Close()
			}
			return err
		}, 1},
		{"compact", []int{320, 320, 300}, func(b *bench, builds []*index.Build) {
			pack(b, builds)
			_, err := b.cache.Store.Packer().PackBuild(ctx, builds[2].ID)
			require.NoError(b, err)
		}, func(b *crashBench) error {
			return b.cache.packing.Compact(ctx,
				packing.Family{Hot: large(b.builds[1]), Base: large(b.builds[0])}, nil)
		}, 3}, // many, and most of them are those of the others
	}
	for _, c := range cases {
		start := onCrashFS(t, c.sizes, c.prepare)
		t.Run(c.name+", stopped", func(t *testing.T) {
			t.Parallel() // each try has a store of its own
			for step := 1; ; step += c.every * crashfs.Stride {
				b := start(t)
				before := b.fs.Steps()
				b.fs.StopAt(before + step)
				err := c.run(b)
				over := err == nil && b.fs.Steps() < before+step
				b.requireAfterCrash(crashfs.Everything, crashfs.Some)
				b.end()
				if over {
					require.Greater(t, step, 4, "it has no steps")
					return
				}
			}
		})
		t.Run(c.name+", failing", func(t *testing.T) {
			t.Parallel()
			// between those where it stopped
			for step := min(2, c.every); ; step += c.every * crashfs.Stride {
				b := start(t)
				before := b.fs.Steps()
				b.fs.FailAt(before+step, []error{syscall.EIO, syscall.ENOSPC}[step%2])
				err := c.run(b)
				over := b.fs.Steps() < before+step
				if err != nil && !over {
					b.requireHeld()
					require.NoError(t, c.run(b), "what failed once works when it is tried again")
					b.requireHeld()
				}
				b.requireAfterCrash(crashfs.Everything)
				b.end()
				if over {
					return
				}
			}
		})
	}
}
