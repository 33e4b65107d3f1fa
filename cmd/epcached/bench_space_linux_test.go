package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// BenchmarkHitBesideSpaceWork measures a hit on a whole blob in two daemons, turn by turn. One has
// nothing on that saves room; the other looks for what is shared, packs, unpacks and collects,
// other builds, without a pause. The work takes as much of the processors from the one as from the
// other, so the ratio is what it does to hits.
func BenchmarkHitBesideSpaceWork(b *testing.B) {
	off := newHitBench(b, "[space]\npack = \"off\"\n")
	on := newHitBench(b, "[space]\nbudget = \"64 MiB\"\npack = \"always\"\n")
	measure := func(n int) (with, without []time.Duration) {
		for range n {
			with, without = append(with, timed(on.hit)), append(without, timed(off.hit))
		}
		slices.Sort(with)
		slices.Sort(without)
		return with, without
	}
	measure(300)
	idle, idleOff := measure(2000)
	_, held, err := on.client.Acquire(context.Background(), on.request, on.fds, nil, nil)
	require.NoError(b, err)
	defer held.Close() // so that the work leaves it whole
	end := on.saveRoom()
	var with, without []time.Duration
	for b.Loop() {
		w, o := measure(1)
		with, without = append(with, w...), append(without, o...)
	}
	b.ReportMetric(float64(end()), "rounds")
	slices.Sort(with)
	slices.Sort(without)
	b.ReportMetric(microseconds(with, 50), "on-p50-us")
	b.ReportMetric(microseconds(without, 50), "off-p50-us")
	b.ReportMetric(microseconds(with, 50)/microseconds(without, 50), "on/off-p50")
	b.ReportMetric(microseconds(with, 99)/microseconds(without, 99), "on/off-p99")
	b.ReportMetric(microseconds(idle, 50)/microseconds(idleOff, 50), "idle-on/off-p50")
}

// saveRoom has the daemon compile models that are alike, and pack, unpack and collect them, in
// turn, until end, which gives how often that was.
func (h *hitBench) saveRoom() (end func() (rounds int)) {
	c, err := unixsock.Dialer{Wait: patience}.Dial(context.Background(), h.socket)
	require.NoError(h, err)
	models := make([]string, 3)
	for i := range models {
		models[i] = filepath.Join(h.TempDir(), "alike.onnx")
		require.NoError(h, os.WriteFile(models[i], compilertest.Dense(7, 512, i+1), 0o644))
	}
	no := func(*wire.Progress) {}
	to := int64(2 << 20) // less than they take whole
	steps := []func() error{
		func() error {
			for _, path := range models {
				request := forModel(path)
				request.HoldsView = true
				_, view, err := c.Acquire(context.Background(), request,
					[]*os.File{openFile(h, path)}, nil, nil)
				if err != nil {
					return err
				}
				view.Close()
			}
			return nil
		},
		func() error {
			_, err := unixsock.Ask[wire.PackReply](context.Background(), c, &wire.Pack{All: true},
				no)
			return err
		},
		func() error {
			_, err := unixsock.Ask[wire.PackReply](context.Background(), c,
				&wire.Pack{All: true, Unpack: true}, no)
			return err
		},
		func() error {
			_, err := unixsock.Ask[wire.CollectReply](context.Background(), c,
				&wire.Collect{ToBytes: &to}, no)
			return err
		},
	}
	for _, step := range steps {
		require.NoError(h, step(), "once, so that all of it is under way")
	}
	ctx, stop := context.WithCancel(context.Background())
	var work sync.WaitGroup
	rounds := 0
	var failed error
	work.Go(func() {
		for ; ctx.Err() == nil && failed == nil; rounds++ {
			failed = steps[rounds%len(steps)]()
		}
	})
	return func() int {
		stop()
		work.Wait()
		require.NoError(h, failed)
		require.NoError(h, c.Close())
		return rounds / len(steps)
	}
}
