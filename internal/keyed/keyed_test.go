package keyed

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLocksExcludeCallersOfOneKeyAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var locks Locks[string]
		unlock, err := locks.Lock(t.Context(), "a")
		require.NoError(t, err)
		other, err := locks.Lock(t.Context(), "b")
		require.NoError(t, err)
		got := make(chan func(), 1)
		go func() {
			next, err := locks.Lock(context.Background(), "a")
			if err == nil {
				got <- next
			}
		}()
		synctest.Wait()
		require.Empty(t, got, "the key's lock is held")
		require.Equal(t, 2, locks.UsersOf("a"))
		unlock()
		synctest.Wait()
		require.Len(t, got, 1)
		(<-got)()
		other()
		require.Zero(t, locks.UsersOf("a"))
		require.Empty(t, locks.inUse, "no key is kept that no caller uses")
	})
}

func TestWaitForALockEndsWithItsContext(t *testing.T) {
	var locks Locks[int]
	unlock, err := locks.Lock(t.Context(), 1)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = locks.Lock(ctx, 1)
	require.ErrorIs(t, err, context.Canceled)
	unlock()
	require.Empty(t, locks.inUse)
}

func TestGroupSharesOneCallAmongItsCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group[int]
		start := func(do func(context.Context)) { go do(context.Background()) }
		release, calls := make(chan struct{}), 0
		do := func(context.Context) (int, error) {
			calls++
			<-release
			return 7, nil
		}
		var callers sync.WaitGroup
		for range 3 {
			callers.Go(func() {
				v, err := g.Do(context.Background(), start, "key", do)
				if v != 7 || err != nil {
					t.Errorf("%d, %v", v, err)
				}
			})
		}
		synctest.Wait()
		v, err := g.Do(t.Context(), start, "other",
			func(context.Context) (int, error) { return 8, nil })
		require.NoError(t, err)
		require.Equal(t, 8, v, "another key does not wait")
		close(release)
		callers.Wait()
		require.Equal(t, 1, calls)
		broken := errors.New("broken")
		_, err = g.Do(t.Context(), start, "key",
			func(context.Context) (int, error) { return 0, broken })
		require.ErrorIs(t, err, broken, "an ended call is not shared")
	})
}

func TestCallGoesOnWhenItsCallersLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group[int]
		start := func(do func(context.Context)) { go do(context.Background()) }
		release := make(chan struct{})
		do := func(ctx context.Context) (int, error) {
			<-release
			return 7, ctx.Err()
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := g.Do(ctx, start, "key", do)
		require.ErrorIs(t, err, context.Canceled)
		got := make(chan int, 1)
		go func() {
			v, _ := g.Do(context.Background(), start, "key", nil)
			got <- v
		}()
		synctest.Wait()
		close(release)
		require.Equal(t, 7, <-got)
	})
}

func TestSharesLeaveSlotsToOtherKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shares := NewShares[string](3, 2)
		var order []string
		var mu sync.Mutex
		leaves := make(chan func(), 10)
		take := func(ctx context.Context, key string) {
			leave, err := shares.Take(ctx, key)
			if err == nil {
				mu.Lock()
				order = append(order, key)
				mu.Unlock()
				leaves <- leave
			}
		}
		for range 4 {
			go take(t.Context(), "a")
		}
		synctest.Wait()
		go take(t.Context(), "b")
		synctest.Wait()
		require.Equal(t, []string{"a", "a", "b"}, order, "two of the three slots are a's at most")
		ended, cancel := context.WithCancel(t.Context())
		go take(ended, "c")
		go take(t.Context(), "d")
		synctest.Wait()
		cancel()
		synctest.Wait()
		(<-leaves)()
		synctest.Wait()
		require.Equal(t, "d", order[3],
			"the key with the fewest slots comes next, and no caller that has left")
		for len(leaves) > 0 {
			(<-leaves)()
			synctest.Wait()
		}
		require.Equal(t, []string{"a", "a"}, order[4:])
		require.Zero(t, shares.inUse)
		require.Empty(t, shares.keys)
	})
}

func TestSlotsOfACrowdedKeyRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shares := NewShares[string](2, 1)
		shares.Rest = func(held time.Duration, waiting int) time.Duration {
			if waiting < 2 {
				return 0
			}
			return 7 * held
		}
		began := time.Now()
		var mu sync.Mutex
		var order []time.Duration // when each of the three had the slot
		take := func() {
			leave, err := shares.Take(t.Context(), "a")
			if err != nil {
				return
			}
			mu.Lock()
			order = append(order, time.Since(began))
			mu.Unlock()
			time.Sleep(time.Second)
			leave()
		}
		for range 3 {
			go take()
		}
		time.Sleep(500 * time.Millisecond)
		leave, err := shares.Take(t.Context(), "b")
		require.NoError(t, err, "another key does not rest")
		leave()
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, []time.Duration{0, 8 * time.Second, 9 * time.Second}, order,
			"it rests where two wait")
		shares.mu.Lock() // timers release slots
		defer shares.mu.Unlock()
		require.Empty(t, shares.keys)
	})
}
