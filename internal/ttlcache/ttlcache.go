// Package ttlcache is a cache of facts with expiry. It finds out each fact once for all concurrent
// callers, and remembers it for some minutes.
package ttlcache

import (
	"context"
	"time"

	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
)

// A Cache has recent facts. It is safe for concurrent use.
type Cache struct {
	now   func() time.Time
	start func(func(context.Context))
	slots keyed.Slots // bounds the concurrent searches

	flights keyed.Group[any]
	found   memo.Table[string, memo.Fact]
}

const (
	lifetime   = 10 * time.Minute
	maxEntries = 1 << 12
	maxRuns    = 2
)

// New returns a Cache. Start runs a search in a goroutine of its own, with a context that ends it.
func New(now func() time.Time, start func(func(context.Context))) *Cache {
	return &Cache{now: now, start: start, slots: make(keyed.Slots, maxRuns)}
}

// Do returns the fact for the key. It calls find, once for all concurrent callers, unless the fact
// is remembered. Errors are not remembered. Do returns early when its context ends; find continues.
func Do[T any](ctx context.Context, f *Cache, key string,
	find func(context.Context) (T, error)) (out T, err error) {
	if v, ok := f.load(key).(T); ok {
		return v, nil
	}
	fact, err := f.flights.Do(ctx, f.start, key, func(ctx context.Context) (any, error) {
		leave, err := f.slots.Take(ctx)
		if err != nil {
			return nil, err
		}
		defer leave()
		if v := f.load(key); v != nil {
			return v, nil // found since the check above
		}
		v, err := find(ctx)
		if err == nil {
			f.found.Save(key, memo.Fact{Value: v, Until: f.now().Add(lifetime)}, maxEntries)
		}
		return v, err
	})
	if err != nil {
		return out, err
	}
	return fact.(T), nil // the key implies the type
}

func (f *Cache) load(key string) any {
	fact, _ := f.found.Load(key)
	return fact.ValueAt(f.now())
}
