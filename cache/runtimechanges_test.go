package cache

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
)

// The SDK changes while a build's files are hashed: the build is sound, but stale for all.
func TestChangeWhileAHitIsVerified(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	for _, f := range first.Build.Files {
		require.NoError(t, b.cache.index.Stamps().ForgetStamp(f.Digest))
	}
	b.reopen()
	b.assessed(func(runtimes.Facts) bool { return true })
	var once sync.Once
	a, err := b.cache.Acquire(context.Background(), b.request(b.model(1)),
		func(p request.Progress) {
			if p.Phase == "verifying" {
				once.Do(func() { b.library("2.0") })
			}
		})
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, "2.0", a.Build.EPs[0].SDKVersion)
	require.Equal(t, request.Compiled, a.Outcome)
}

// A request with the earlier libraries' contents starts again with the present ones.
func TestContentsThatArePast(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	r := b.request(b.model(1))
	r.EPs[0].Options = map[string]string{"hardware": "sim-2"} // so that there is something to probe
	var once sync.Once
	a, err := b.cache.Acquire(context.Background(), r, func(p request.Progress) {
		if p.Phase != "probing" {
			return
		}
		once.Do(func() {
			b.library("2.0")
			_, err := b.cache.runtimes.Content(context.Background(), b.cache.runtimes.All()[0],
				func(string) {})
			require.NoError(t, err)
		})
	})
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, "2.0", a.Build.EPs[0].SDKVersion)
}

// The libraries are rewritten with the same bytes during their probe: its result is of files that
// changed, so it is dropped. They are assessed again when they are at rest, whether that is seen
// before or after the probe has failed.
func TestRuntimeChangesDuringAnAssessment(t *testing.T) {
	for name, seenAt := range map[string]func(b *bench){
		"seen before": func(b *bench) {
			_, err := b.cache.runtimes.Content(context.Background(), b.cache.runtimes.All()[0],
				func(string) {})
			require.NoError(b, err)
		},
		"seen after": func(*bench) {},
	} {
		t.Run(name, func(t *testing.T) {
			b, s := slowToKnow(t)
			<-s.began
			s.pass <- struct{}{}
			b.assessed(func(runtimes.Facts) bool { return true })
			b.library("2.0")
			<-s.began
			b.library("2.0")
			seenAt(b)
			close(s.pass)
			require.Eventually(t,
				func() bool { return slices.Contains(kinds(b.events(b.self())), event.Changed) },
				soon, time.Millisecond)
			for _, e := range b.events(b.self()) {
				require.NotEqual(t, event.Unusable, e.Kind)
				if e.Kind == event.Changed {
					require.Contains(t, e.Text, "SDK: 2.0, was 1.0")
					require.NotContains(t, e.Text, "none")
				}
			}
		})
	}
}
