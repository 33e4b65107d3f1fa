package ttlcache

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAFactIsFoundOnceAndHoldsForAWhile(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	f := New(func() time.Time { return now }, func(do func(context.Context)) { go do(t.Context()) })
	calls := 0
	find := func(context.Context) (int, error) {
		calls++
		if calls == 1 {
			return 0, errors.New("broken")
		}
		return calls, nil
	}
	_, err := Do(t.Context(), f, "key", find)
	require.Error(t, err)
	for range 2 {
		v, err := Do(t.Context(), f, "key", find)
		require.NoError(t, err)
		require.Equal(t, 2, v, "an error is not remembered")
	}
	now = now.Add(lifetime)
	v, err := Do(t.Context(), f, "key", find)
	require.NoError(t, err)
	require.Equal(t, 3, v)
}

// At the daemon's end a search that waits for its turn ends too.
func TestAWaitingSearchEndsWithItsContext(t *testing.T) {
	work, end := context.WithCancel(t.Context())
	f := New(time.Now, func(do func(context.Context)) { go do(work) })
	for range maxRuns {
		f.slots <- struct{}{}
	}
	done := make(chan error, 1)
	go func() {
		_, err := Do(t.Context(), f, "key",
			func(context.Context) (bool, error) { return true, nil })
		done <- err
	}()
	end()
	require.ErrorIs(t, <-done, context.Canceled)
}
