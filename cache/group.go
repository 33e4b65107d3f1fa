package cache

import (
	"context"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
)

// identified is the attempt with the identity of every model of the request. That for a group asks for what makes
// execution providers share.
func (c *Cache) identified(ctx context.Context, at *request.Attempt) (_ *request.Attempt, err error) {
	known, r := *at, at.Request
	if known.TooLarge, err = c.tooLargeToAdopt(r); err != nil {
		return nil, err
	}
	id, err := c.models.Identify(ctx, &identity.Asked{UID: r.Peer.UID, Models: r.AllModels(), Adopt: known.Adopts(), Phase: at.Phase})
	if err != nil {
		return nil, err
	}
	if len(r.Group) > 0 {
		r = r.Sharing()
	}
	return known.WithModel(id, r), nil
}

// planMember thinks the request through as one for a group that has its model among its members. It is nil where there is
// no such group.
func (c *Cache) planMember(ctx context.Context, at *request.Attempt) (*request.Attempt, error) {
	if len(at.Identity.Group) > 0 || at.Embed {
		return nil, nil
	}
	member := at.WithRequest(at.Sharing())
	member.AsMember = true
	member, err := c.planned(ctx, member)
	if err != nil && ctx.Err() == nil {
		return nil, nil // the request itself is answered as if nobody had looked
	}
	return member, err
}
