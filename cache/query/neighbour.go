package query

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// MaxNeighbours is how many neighbours an explanation has at most.
const MaxNeighbours = 5

// Bounds of the search. A request waits for its turn within its searchTime.
const (
	searchTime  = 2 * time.Second
	maxSearches = 2 // at the same time
)

type near struct {
	build    *index.Build
	other    bool // another model of the same name
	distance int  // fields that differ
}

func (n *near) compare(other *near) int {
	return cmp.Or(boolean(n.other)-boolean(other.other), n.distance-other.distance,
		other.build.Created.Compare(n.build.Created),
		strings.Compare(n.build.ID.String(), other.build.ID.String()))
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

// addNeighbours adds the entries nearest to the request among those that the peer may see: of the
// same model the ones whose requests differ in the fewest fields, then those of another model with
// the same name, because the file that the application asks with may have been changed.
func (q *Queries) addNeighbours(ctx context.Context, out *wire.Explanation, of *Question) error {
	asked, err := identity.ParseFields(of.Record)
	if err != nil {
		return apierr.New(apierr.Internal, err, "model %q", of.Name)
	}
	limited, cancel := context.WithTimeout(ctx, searchTime)
	defer cancel()
	select {
	case q.searches <- struct{}{}:
		defer func() { <-q.searches }()
	case <-limited.Done():
		if ctx.Err() == nil {
			return nil // an explanation without neighbours is still one
		}
		return Error(ctx, ctx.Err())
	}
	builds := make(map[index.RequestKey]uint32) // of each entry that came up
	var best []*near                            // nearest first
	err = q.index.OfModel(limited, of.Model, of.Name, func(b index.Build) error {
		other := b.ModelDigest != of.Model
		if b.RequestKey == of.Key || other && (of.Name == "" || b.ModelName != of.Name) ||
			!q.rights.MaySee(of.Peer, b.ID, b.Scope) {
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
		best = keepNearest(best, &near{build: &b, other: other, distance: asked.Count(record)})
		return nil
	})
	if err != nil && !(errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil) {
		return Error(ctx, err)
	}
	for _, n := range best {
		record, err := identity.ParseFields(n.build.RecordJSON)
		if err != nil {
			return Error(ctx, err)
		}
		out.Neighbours = append(out.Neighbours, &wire.Neighbour{RequestKey: n.build.RequestKey.String(),
			ModelName: n.build.ModelName, Builds: builds[n.build.RequestKey],
			Differences: differencesReply(asked.Against(record))})
	}
	return nil
}

func keepNearest(best []*near, n *near) []*near {
	at, _ := slices.BinarySearchFunc(best, n, func(a, b *near) int { return a.compare(b) })
	if at == MaxNeighbours {
		return best
	}
	best = slices.Insert(best, at, n)
	return best[:min(len(best), MaxNeighbours)]
}
