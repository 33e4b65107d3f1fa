package cache

import (
	"context"
	"sync"

	"golang.org/x/sync/singleflight"
)

// running is work that goes on when its first asker leaves, for that must not fail the others: a worker has its own time
// limit, and the cache's end is the end of all. Other askers have left by then.
type running struct {
	until context.Context
	work  *sync.WaitGroup
}

// together runs do for the key, once however many ask at that time, and gives all of them what it brought.
func together[T any](ctx context.Context, r running, group *singleflight.Group, key string, do func(context.Context) (T, error)) (T, error) {
	var none T
	// Before it starts, not in it: who asks is waited for at the end, and may leave before it has started.
	r.work.Add(1)
	ch := group.DoChan(key, func() (any, error) {
		ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(r.until, cancel)()
		return do(ctx)
	})
	select {
	case <-ctx.Done():
		go func() {
			<-ch
			r.work.Done()
		}()
		return none, ctx.Err()
	case out := <-ch:
		r.work.Done()
		if out.Err != nil {
			return none, out.Err
		}
		return out.Val.(T), nil
	}
}
