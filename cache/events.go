package cache

import (
	"context"
	"time"

	"github.com/epcached/epcached/index"
)

// Event is something that happened to an entry, or to the machine.
type Event struct {
	Sequence   uint64 // grows; 0: from before the daemon's start
	At         time.Time
	Kind       string
	RequestKey index.RequestKey // zero: of the machine
	Build      index.BuildKey   // zero: of no build, or of one that is gone
	Model      string           // its name
	Runtime    string
	Text       string
}

// Events gives what happened since, oldest first, as far as it is kept: at most the newest limit of them, which the
// peer may see. A limit of 0 is the cache's choice.
func (c *Cache) Events(ctx context.Context, p Peer, since time.Time, limit int) ([]Event, error) {
	return nil, fail(Unavailable, nil, "events are not given yet")
}

// Subscribe calls fn with each event that the peer may see, one at a time, until the context ends, which is no
// error, or fn fails. A subscriber that falls far behind misses events; the gap shows in their sequence.
func (c *Cache) Subscribe(ctx context.Context, p Peer, fn func(Event) error) error {
	return fail(Unavailable, nil, "events are not given yet")
}
