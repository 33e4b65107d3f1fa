package cache

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// While a build's files are hashed the SDK becomes another one: the build is sound, and for nobody any more.
func TestChangeWhileAHitIsVerified(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	for _, f := range first.Build.Files {
		require.NoError(t, b.cache.index.ForgetStamp(f.Digest))
	}
	b.reopen()
	b.assessed(func(RuntimeFacts) bool { return true })
	var once sync.Once
	a, err := b.cache.Acquire(context.Background(), b.request(b.model(1)), func(p Progress) {
		if p.Phase == "verifying" {
			once.Do(func() { b.library("2.0") })
		}
	})
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, "2.0", a.Build.EPs[0].SDKVersion)
	require.Equal(t, Compiled, a.Outcome)
}

// Who came with the earlier libraries' contents begins again with those that are there now.
func TestContentsThatArePast(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	r := b.request(b.model(1))
	r.EPs[0].Options = map[string]string{"hardware": "sim-2"} // so that there is something to probe
	var once sync.Once
	a, err := b.cache.Acquire(context.Background(), r, func(p Progress) {
		if p.Phase != "probing" {
			return
		}
		once.Do(func() {
			b.library("2.0")
			_, err := b.cache.content(context.Background(), b.cache.runtimes.all()[0], func(string) {})
			require.NoError(t, err)
		})
	})
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, "2.0", a.Build.EPs[0].SDKVersion)
}
