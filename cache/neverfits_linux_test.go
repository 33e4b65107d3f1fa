package cache

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/views"
)

// What is larger than what there may be is compiled once for all who ask while its view is there, one after the other or at the same time, and again when
// that has gone or there may be more.
func TestWhatNeverFitsIsCompiledOnceWhileItIsThere(t *testing.T) {
	for name, bound := range map[string]SpaceOptions{"budget": {Budget: Amount{Bytes: 1}}, "quota": {UserBytes: Amount{Bytes: 1}}} {
		t.Run(name, func(t *testing.T) {
			b := newBenchWith(t, func(o *Options) { o.Space = bound })
			first := b.acquire(b.held(1))
			require.Equal(t, Compiled, first.Outcome)
			require.True(t, first.Unkept)
			require.NoError(t, first.View.Close())
			answers := make([]*Answer, 10)
			var all sync.WaitGroup
			for i := range answers {
				r := b.held(1)
				r.OnMiss = []OnMiss{Wait, Fail}[i%2]
				all.Go(func() {
					var err error
					answers[i], err = b.cache.Acquire(context.Background(), r, func(Progress) {})
					if err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			for _, a := range answers {
				require.Equal(t, Waited, a.Outcome)
				require.True(t, a.Unkept)
				require.Equal(t, first.Path, a.Path, "the same view")
				require.Len(t, a.Warnings, 1)
				require.Contains(t, a.Warnings[0], "not kept: ")
				require.Contains(t, a.Why, "not kept: ")
				require.NoError(t, a.View.Close())
			}
			require.EqualValues(t, 1, b.compiler.Compiles.Load())
			require.EqualValues(t, 1, b.cache.index.Counters()["unkept"])

			b.later.Add(int64(views.HandOver + time.Second))
			b.cache.views.Sweep()
			require.NoDirExists(t, first.Path)
			again := b.acquire(b.held(1))
			require.Equal(t, Compiled, again.Outcome)
			require.NoError(t, os.RemoveAll(again.Path))
			_, err := b.cache.serveCompiled(context.Background(), &compiled{build: again.Build, alone: again.view, found: true}, func(string) {})
			require.ErrorIs(t, err, errGone, "who finds it, and comes too late, begins again")
			require.Equal(t, Compiled, b.acquire(b.held(1)).Outcome)
			require.EqualValues(t, 3, b.compiler.Compiles.Load())

			next := b.options()
			next.Space = SpaceOptions{}
			require.NoError(t, b.cache.Reload(next))
			require.False(t, b.acquire(b.held(1)).Unkept, "now it fits")
			require.Equal(t, Hit, b.acquire(b.held(1)).Outcome)
		})
	}
}

// Whoever reports that such a result does not load has another one compiled, and is not given the same again. Others' results are not meant.
func TestWhatNeverFitsAndIsReportedIsGivenToNobody(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Space = SpaceOptions{Budget: Amount{Bytes: 1}} })
	ctx := context.Background()
	first := b.acquire(b.held(1))
	require.True(t, first.Unkept)
	r := Report{Build: first.Build.BuildKey.String(), Code: 10, Text: "INVALID_GRAPH", ORTVersion: "1.31.1", Graph: first.view.ID() + "/" + "model_ctx.onnx"}
	other := r
	other.Graph = "0123456789abcdef/model_ctx.onnx"
	_, err := b.cache.Report(ctx, b.self(), other)
	require.ErrorContains(t, err, "none that you were given")
	options := r
	options.Code, options.Text = 9, "" // the EP is not in the session
	d, err := b.cache.Report(ctx, b.self(), options)
	require.NoError(t, err)
	require.Equal(t, DecidedSound, d.Decision)
	require.Equal(t, first.Path, b.acquire(b.held(1)).Path)
	d, err = b.cache.Report(ctx, b.self(), r)
	require.NoError(t, err)
	require.Equal(t, DecidedRetry, d.Decision)
	again := b.acquire(b.held(1))
	require.Equal(t, Compiled, again.Outcome)
	require.NotEqual(t, first.Path, again.Path)
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
	require.DirExists(t, first.Path, "who has it still has it")
}
