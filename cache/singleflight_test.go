package cache

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
)

func TestConcurrentRequestsShareOneCompile(t *testing.T) {
	b := newBench(t)
	b.compiler.Delay = 200 * time.Millisecond
	var wg sync.WaitGroup
	answers := make([]*request.Answer, 8)
	for i := range answers {
		r := b.request(b.model(1))
		wg.Go(func() {
			a, err := b.cache.Acquire(context.Background(), r, nil)
			if err == nil {
				answers[i] = a
			}
		})
	}
	wg.Wait()
	compiled := 0
	for _, a := range answers {
		require.NotNil(t, a)
		defer a.View.Close()
		require.Equal(t, answers[0].Graph, a.Graph)
		if a.Outcome == request.Compiled {
			compiled++
		}
	}
	require.Equal(t, 1, compiled)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

func TestCompileContinuesWhenItsFirstCallerLeaves(t *testing.T) {
	b := newBench(t)
	b.compiler.Delay = 300 * time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan error, 1)
	r := b.request(b.model(1))
	go func() {
		_, err := b.cache.Acquire(ctx, r, nil)
		first <- err
	}()
	require.Eventually(t, func() bool { return b.compiler.Compiles.Load() == 1 }, soon,
		time.Millisecond)
	second := make(chan *request.Answer, 1)
	r2 := b.request(b.model(1))
	go func() {
		a, err := b.cache.Acquire(context.Background(), r2, nil)
		if err == nil {
			second <- a
		}
		close(second)
	}()
	require.Eventually(t, func() bool { return b.waiters() == 2 }, soon, time.Millisecond)
	cancel()
	require.Equal(t, apierr.Cancelled, apierr.ClassOf(<-first))
	a := <-second
	require.NotNil(t, a)
	defer a.View.Close()
	require.Equal(t, request.Waited, a.Outcome)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

func TestLastCallerCancelsTheCompile(t *testing.T) {
	b := newBench(t)
	b.compiler.Delay = time.Minute
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := b.cache.Acquire(ctx, b.request(b.model(1)), nil)
	require.Equal(t, apierr.Deadline, apierr.ClassOf(err))
	require.Eventually(t, func() bool { return b.cache.jobs.Count() == 0 }, soon, time.Millisecond)
	require.Eventually(t, func() bool {
		entries, err := os.ReadDir(filepath.Join(b.state, "staging"))
		return err == nil && len(entries) == 0
	}, soon, time.Millisecond)
}
