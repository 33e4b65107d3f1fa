package cache

import (
	"context"

	"github.com/epcached/epcached/index"
)

// Explanation is a decision with its reasons.
type Explanation struct {
	Decision   string // "hit", "miss", "stale", "passthrough"; of an entry that was asked for by name: its state
	Reason     string
	RequestKey index.RequestKey
	Record     string // the request record as JSON
	Candidates []Candidate
	Neighbours []Neighbour
	History    []Event // oldest first
	Runtime    string  // what the decision is for
}

// Candidate is a build of the entry, in the order in which they are considered.
type Candidate struct {
	Listing     Listing
	Served      bool
	Reason      string
	Differences []Difference // between what would be made now and what made it
}

// Neighbour is an entry that is much like the one asked for.
type Neighbour struct {
	RequestKey  index.RequestKey
	ModelName   string
	Builds      int
	Differences []Difference
}

// Difference is one field in which two records differ. An empty value is one that is not there.
type Difference struct {
	Field, Asked, Found string
}

// Why explains what an entry's state is, and how it came to be so.
func (c *Cache) Why(ctx context.Context, p Peer, entry string) (*Explanation, error) {
	return nil, fail(Unavailable, nil, "entry %q: not explained yet", entry)
}
