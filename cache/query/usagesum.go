package query

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// OwnBytes returns what removing a build would free on the disk now. What the build shares with
// builds that the peer may not see counts as freed, so that the sum does not disclose them.
func (q *Queries) OwnBytes(p rights.Peer, b *index.Build) (sum int64, err error) {
	for d := range q.store.PartsOf(b) {
		others, err := q.othersNeed(p, b, d)
		if err != nil {
			return 0, err
		}
		if !others {
			sum += q.store.DiskBytesOf(d)
		}
	}
	return sum, nil
}

// FreedBy is OwnBytes of removing several builds together. It is more than the sum of OwnBytes where
// they share bytes, or one is packed with the bytes of another.
func (q *Queries) FreedBy(ctx context.Context, p rights.Peer, ids []index.BuildID) (sum int64, err error) {
	going := make(map[index.BuildID]bool, len(ids))
	for _, id := range ids {
		going[id] = true
	}
	counted := make(map[cas.Digest]bool)
	for _, id := range ids {
		b, err := q.index.Get(id)
		switch {
		case ctx.Err() != nil:
			return 0, ctx.Err()
		case errors.Is(err, index.ErrNotFound):
			continue // removed meanwhile
		case err != nil:
			return 0, err
		}
		for d := range q.store.PartsOf(&b) {
			if counted[d] {
				continue
			}
			counted[d] = true
			needs, err := q.store.NeededBy(d)
			if err != nil {
				return 0, err
			}
			if !slices.ContainsFunc(needs, func(id index.BuildID) bool {
				return !going[id] && q.rights.MayKnow(p, id)
			}) {
				sum += q.store.DiskBytesOf(d)
			}
		}
	}
	return sum, nil
}

func (q *Queries) othersNeed(p rights.Peer, b *index.Build, d cas.Digest) (bool, error) {
	if q.rights.Administrator(p) && len(q.forms.Recipes.Users(d)) == 0 { // no recipe takes from it
		ids, err := q.index.Needs(d)
		return slices.ContainsFunc(ids, func(id index.BuildID) bool { return id != b.ID }), err
	}
	needs, err := q.store.NeededBy(d)
	return slices.ContainsFunc(needs, func(id index.BuildID) bool {
		return id != b.ID && q.rights.MayKnow(p, id)
	}), err
}
