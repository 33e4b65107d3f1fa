package cache

import (
	"context"
	"sync"

	"github.com/epcached/epcached/refusal"
)

// turns let one thing of each user's go on at a time: artefacts that are put, so that nobody can keep others waiting with files that
// take for ever to read, and explanations, which read whatever the store has of an entry.
type turns struct {
	mu     sync.Mutex
	tracks map[uint32]*track // by owner; guarded by mu
}

// track is what one user's things go through.
type track struct {
	token chan struct{}
	users int // that hold it, or wait for it; guarded by turns.mu
}

// enter waits until no other thing of the owner's goes on, or the claim that it is for is over; over is nil where it is for none. What it
// gives ends the own turn.
func (ts *turns) enter(ctx context.Context, owner uint32, over <-chan struct{}) (leave func(), err error) {
	ts.mu.Lock()
	if ts.tracks == nil {
		ts.tracks = make(map[uint32]*track)
	}
	l := ts.tracks[owner]
	if l == nil {
		l = &track{token: make(chan struct{}, 1)}
		ts.tracks[owner] = l
	}
	l.users++
	ts.mu.Unlock()
	forget := func() {
		ts.mu.Lock()
		defer ts.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(ts.tracks, owner)
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
		return nil, refusal.New(refusal.NotFound, nil, "the claim is over")
	}
}
