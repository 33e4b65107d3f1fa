// Package keyed has a lock and a single-flight for each of many keys, and slots for work of one kind.
// Callers wait no longer than their contexts last.
package keyed

import (
	"context"
	"sync"

	"golang.org/x/sync/singleflight"
)

// Slots bounds how many callers do the same kind of work at a time, by its capacity.
type Slots chan struct{}

// Take blocks until there is a slot, and returns a function that gives it back.
func (s Slots) Take(ctx context.Context) (leave func(), err error) {
	select {
	case s <- struct{}{}:
		return func() { <-s }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Locks is a lock for each key. The zero value is ready for use.
type Locks[K comparable] struct {
	mu    sync.Mutex // guards inUse and the counts; never held while waiting
	inUse map[K]*lock
}

type lock struct {
	token chan struct{} // holds one token while the lock is held
	users int           // holder and waiters
}

// Lock blocks until no other caller holds the key's lock, and returns a function that releases it.
func (l *Locks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	l.mu.Lock()
	one := l.inUse[key]
	if one == nil {
		if l.inUse == nil {
			l.inUse = make(map[K]*lock)
		}
		one = &lock{token: make(chan struct{}, 1)}
		l.inUse[key] = one
	}
	one.users++
	l.mu.Unlock()
	select {
	case one.token <- struct{}{}:
		return func() { <-one.token; l.leave(key, one) }, nil
	case <-ctx.Done():
		l.leave(key, one)
		return nil, ctx.Err()
	}
}

// Users returns how many callers hold the key's lock or wait for it.
func (l *Locks[K]) Users(key K) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one := l.inUse[key]; one != nil {
		return one.users
	}
	return 0
}

func (l *Locks[K]) leave(key K, one *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.users--; one.users == 0 {
		delete(l.inUse, key)
	}
}

// Group runs one call at a time for each key, and gives its result to all callers that come
// meanwhile. A call goes on when its callers leave, because others may have joined, and has a
// context of its own. The zero value is ready for use.
type Group[V any] struct{ calls singleflight.Group }

// Do returns the result of do, or of the call for the key that runs already. Start runs the function
// that it is given on a goroutine of its own, with the context of the call; it must not block.
func (g *Group[V]) Do(ctx context.Context, start func(func(context.Context)), key string,
	do func(context.Context) (V, error)) (value V, err error) {
	called := g.calls.DoChan(key, func() (any, error) {
		var value V
		done := make(chan error, 1)
		start(func(ctx context.Context) {
			var err error
			value, err = do(ctx)
			done <- err
		})
		err := <-done
		return value, err
	})
	select {
	case result := <-called:
		value, _ = result.Val.(V) // an interface may be nil
		return value, result.Err
	case <-ctx.Done():
		return value, ctx.Err()
	}
}
