// Package keyed has a lock and a single-flight for each of many keys, and slots for work of one
// kind. Callers wait at most until their contexts end.
package keyed

import (
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// Slots bounds how many callers do the same kind of work at a time, by its capacity.
type Slots chan struct{}

// Take blocks until there is a slot, and returns a function that releases it.
func (s Slots) Take(ctx context.Context) (leave func(), err error) {
	select {
	case s <- struct{}{}:
		return func() { <-s }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Shares bounds how many callers do the same kind of work at a time, in all and for each key, so
// that the callers of one key never have all slots. A free slot goes to the waiting key with the
// fewest slots.
type Shares[K comparable] struct {
	// Rest returns how long a slot rests before the next caller gets it, after a caller held it for
	// held while waiting callers of the same key wait; nil: not at all. Set it before Take is
	// called.
	Rest func(held time.Duration, waiting int) time.Duration

	all, each int

	mu    sync.Mutex // guards the fields below; never held while waiting
	inUse int
	keys  map[K]*share
}

type share struct {
	inUse   int
	waiting []chan struct{} // first in, first out; closed when the caller gets a slot
}

// NewShares returns shares of all slots, at most each of them for one key.
func NewShares[K comparable](all, each int) *Shares[K] {
	return &Shares[K]{all: all, each: each, keys: make(map[K]*share)}
}

// Take blocks until there is a slot for the key, and returns a function that releases it.
func (s *Shares[K]) Take(ctx context.Context, key K) (leave func(), err error) {
	turn := make(chan struct{})
	s.mu.Lock()
	one := s.keys[key]
	if one == nil {
		one = new(share)
		s.keys[key] = one
	}
	one.waiting = append(one.waiting, turn)
	s.admit()
	s.mu.Unlock()
	select {
	case <-turn:
		return s.leave(key, turn), nil
	case <-ctx.Done():
		s.release(key, turn)
		return nil, ctx.Err()
	}
}

// leave returns the function that gives a slot back.
func (s *Shares[K]) leave(key K, turn chan struct{}) func() {
	if s.Rest == nil {
		return func() { s.release(key, turn) }
	}
	began := time.Now()
	return func() {
		s.mu.Lock()
		waiting := len(s.keys[key].waiting)
		s.mu.Unlock()
		if rest := s.Rest(time.Since(began), waiting); rest > 0 {
			time.AfterFunc(rest, func() { s.release(key, turn) })
			return
		}
		s.release(key, turn)
	}
}

// release ends a caller's wait, or gives its slot back.
func (s *Shares[K]) release(key K, turn chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	one := s.keys[key]
	if i := slices.Index(one.waiting, turn); i >= 0 {
		one.waiting = slices.Delete(one.waiting, i, i+1)
	} else {
		one.inUse--
		s.inUse--
	}
	if one.inUse+len(one.waiting) == 0 {
		delete(s.keys, key)
	}
	s.admit()
}

func (s *Shares[K]) admit() {
	for s.inUse < s.all {
		var next *share
		for _, one := range s.keys {
			if len(one.waiting) > 0 && one.inUse < s.each &&
				(next == nil || one.inUse < next.inUse) {
				next = one
			}
		}
		if next == nil {
			return
		}
		close(next.waiting[0])
		next.waiting = slices.Delete(next.waiting, 0, 1)
		next.inUse++
		s.inUse++
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
		return func() { <-one.token; l.unlock(key, one) }, nil
	case <-ctx.Done():
		l.unlock(key, one)
		return nil, ctx.Err()
	}
}

// UsersOf returns how many callers hold the key's lock or wait for it.
func (l *Locks[K]) UsersOf(key K) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one := l.inUse[key]; one != nil {
		return one.users
	}
	return 0
}

func (l *Locks[K]) unlock(key K, one *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.users--; one.users == 0 {
		delete(l.inUse, key)
	}
}

// Group runs one call at a time for each key, and returns its result to all callers that arrive in
// the meantime (single-flight). A call has its own context, and continues when its callers leave,
// because others may have joined. The zero value is ready for use.
type Group[V any] struct{ calls singleflight.Group }

// Do returns the result of do, or of the running call for the key. start runs a function on a
// goroutine of its own, with the context of the call, and must not block.
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
