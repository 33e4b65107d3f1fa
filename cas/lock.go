package cas

import (
	"context"
	"sync"
)

// keyLocks is a lock for each blob. Waiting can be cancelled, for who holds
// one may be hashing gigabytes.
type keyLocks struct {
	mu    sync.Mutex // guards inUse and the counts; never held while waiting
	inUse map[Digest]*keyLock
}

type keyLock struct {
	turn  chan struct{} // holds one token while the lock is free
	users int           // holder and waiters
}

func (k *keyLocks) lock(ctx context.Context, d Digest) (unlock func(), err error) {
	k.mu.Lock()
	l := k.inUse[d]
	if l == nil {
		if k.inUse == nil {
			k.inUse = make(map[Digest]*keyLock)
		}
		l = &keyLock{turn: make(chan struct{}, 1)}
		l.turn <- struct{}{}
		k.inUse[d] = l
	}
	l.users++
	k.mu.Unlock()
	select {
	case <-l.turn:
		return func() { l.turn <- struct{}{}; k.leave(d, l) }, nil
	case <-ctx.Done():
		k.leave(d, l)
		return nil, ctx.Err()
	}
}

func (k *keyLocks) leave(d Digest, l *keyLock) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(k.inUse, d)
	}
}
