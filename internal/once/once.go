// Package once finds out a fact once for all callers, and remembers it for a while, so that a thousand
// questions start no more work than one.
package once

import (
	"context"
	"time"

	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
)

// Facts are what was found out. All methods may be called at the same time.
type Facts struct {
	now   func() time.Time
	start func(func(context.Context))
	slots keyed.Slots // one token for each search that may run

	running keyed.Group[any]
	known   memo.Table[string, memo.Fact]
}

const (
	holds   = 10 * time.Minute
	most    = 1 << 12
	maxRuns = 2
)

// New returns Facts. Start runs a search in a goroutine of its own, with a context that ends it.
func New(now func() time.Time, start func(func(context.Context))) *Facts {
	return &Facts{now: now, start: start, slots: make(keyed.Slots, maxRuns)}
}

// Do returns the fact for the key. It calls find unless that found the fact lately, once for all callers
// at the same time. Errors are not remembered. Do returns early when its context ends; find goes on.
func Do[T any](ctx context.Context, f *Facts, key string, find func(context.Context) (T, error)) (out T, err error) {
	if v, ok := f.load(key).(T); ok {
		return v, nil
	}
	fact, err := f.running.Do(ctx, f.start, key, func(ctx context.Context) (any, error) {
		leave, err := f.slots.Take(ctx)
		if err != nil {
			return nil, err
		}
		defer leave()
		if v := f.load(key); v != nil {
			return v, nil // found between the look above and here
		}
		v, err := find(ctx)
		if err == nil {
			f.known.Save(key, memo.Fact{Value: v, Until: f.now().Add(holds)}, most)
		}
		return v, err
	})
	if err != nil {
		return out, err
	}
	return fact.(T), nil // the key says what kind of fact it is
}

func (f *Facts) load(key string) any {
	fact, _ := f.known.Load(key)
	return fact.Now(f.now())
}
