package cache

import (
	"context"
	"sync"
)

// puts are the artefacts that are being taken: one of each user at a time, so that nobody can keep others waiting with
// files that take for ever to read.
type puts struct {
	mu       sync.Mutex
	tracks   map[uint32]*track // by owner; guarded by mu
	reserved int64             // bytes that are on their way to the disk; guarded by mu
}

// track is what one user's puts go through.
type track struct {
	token chan struct{}
	users int // that hold it, or wait for it; guarded by puts.mu
}

// enter waits until no other put of the owner's is taken, or the claim is over. What it gives ends the own turn.
func (ps *puts) enter(ctx context.Context, owner uint32, over <-chan struct{}) (leave func(), err error) {
	ps.mu.Lock()
	if ps.tracks == nil {
		ps.tracks = make(map[uint32]*track)
	}
	l := ps.tracks[owner]
	if l == nil {
		l = &track{token: make(chan struct{}, 1)}
		ps.tracks[owner] = l
	}
	l.users++
	ps.mu.Unlock()
	forget := func() {
		ps.mu.Lock()
		defer ps.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(ps.tracks, owner)
		}
	}
	select {
	case l.token <- struct{}{}:
		return func() { <-l.token; forget() }, nil
	case <-ctx.Done():
		forget()
		return nil, ctx.Err()
	case <-over:
		forget()
		return nil, fail(NotFound, nil, "the claim is over")
	}
}

// reserve sets so many bytes of the disk aside, if they fit beside what others have set aside and into what may be free.
func (ps *puts) reserve(bytes int64, fits func(need int64) error) (release func(), err error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if err := fits(ps.reserved + bytes); err != nil {
		return nil, err
	}
	ps.reserved += bytes
	return func() {
		ps.mu.Lock()
		defer ps.mu.Unlock()
		ps.reserved -= bytes
	}, nil
}
