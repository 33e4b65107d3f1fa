package cache

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

const (
	maxNeighbours = 5
	// searchTime is how long neighbours are looked for: an explanation without them is still one.
	searchTime = 2 * time.Second
	// maxSearches bounds how many look at all builds at the same time; the others wait within their searchTime.
	maxSearches = 2
)

// wanted is the request that neighbours are looked for.
type wanted struct {
	key    index.RequestKey
	model  cas.Digest
	name   string
	record identity.Fields
}

// near is a candidate for a neighbour, and how far it is.
type near struct {
	build    *index.Build
	other    bool // another model of the same name
	distance int  // fields that differ
}

func (n *near) compare(other *near) int {
	return cmp.Or(boolean(n.other)-boolean(other.other), n.distance-other.distance,
		other.build.Created.Compare(n.build.Created), strings.Compare(n.build.ID.String(), other.build.ID.String()))
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

// neighbours finds the entries nearest to the request among those that the peer may see: of the same model the ones
// whose requests differ in the fewest fields, then those of another model with the same name, for the file that the
// application asks with may have been changed.
func (c *Cache) neighbours(ctx context.Context, p Peer, w wanted) ([]*wire.Neighbour, error) {
	limited, cancel := context.WithTimeout(ctx, searchTime)
	defer cancel()
	select {
	case c.searches <- struct{}{}:
		defer func() { <-c.searches }()
	case <-limited.Done():
		return nil, ctx.Err()
	}
	builds := make(map[index.RequestKey]uint32) // of each entry that came up
	var best []*near                            // nearest first
	err := c.index.OfModel(limited, w.model, w.name, func(b index.Build) error {
		other := b.ModelDigest != w.model
		if b.RequestKey == w.key || other && (w.name == "" || b.ModelName != w.name) || !c.rights.MaySee(p, b.ID, b.Scope) {
			return nil
		}
		builds[b.RequestKey]++
		if builds[b.RequestKey] > 1 {
			return nil // its record is that of the first
		}
		record, err := identity.ParseFields(b.RecordJSON)
		if err != nil {
			return nil // of a build that a later epcached made, perhaps: no neighbour that could be explained
		}
		best = keepNearest(best, &near{build: &b, other: other, distance: w.record.Count(record)})
		return nil
	})
	if err != nil && !(errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil) {
		return nil, err
	}
	var out []*wire.Neighbour
	for _, n := range best {
		record, err := identity.ParseFields(n.build.RecordJSON)
		if err != nil {
			return nil, err
		}
		out = append(out, &wire.Neighbour{RequestKey: n.build.RequestKey.String(),
			ModelName: n.build.ModelName, Builds: builds[n.build.RequestKey],
			Differences: differencesReply(w.record.Against(record))})
	}
	return out, nil
}

// keepNearest puts n where it belongs, and drops what is too far.
func keepNearest(best []*near, n *near) []*near {
	at, _ := slices.BinarySearchFunc(best, n, func(a, b *near) int { return a.compare(b) })
	if at == maxNeighbours {
		return best
	}
	best = slices.Insert(best, at, n)
	return best[:min(len(best), maxNeighbours)]
}
