package cache

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/views"
)

// errSeen ends a search.
var errSeen = errors.New("seen")

// mayGoFor finds out whether so much of a user's builds may go that a reservation of so many logical bytes is within the quota: before anything goes
// for it, for what is not kept then would have cost the others as well. mayGo is no more than what has to; stays says why others may not.
func (c *Cache) mayGoFor(ctx context.Context, r *reservation, bytes int64) (mayGo int64, stays string, err error) {
	b, err := c.bounds()
	if err != nil || b.user == 0 || bytes == 0 || bytes > b.user {
		return 0, "", err
	}
	ctx = context.WithoutCancel(ctx)
	users, err := c.index.Users(ctx)
	if err != nil {
		return 0, "", err
	}
	s := c.places
	s.mu.Lock()
	above := users[r.user].LogicalBytes + s.byUser[r.user] - r.bytes + bytes - b.user
	s.mu.Unlock()
	if above <= 0 {
		return 0, "", nil
	}
	c.flushUses()
	var held int64
	var own views.OwnFiles
	heldBuilds, left := 0, users[r.user].Builds
	err = c.index.EachBrief(ctx, index.BuildID{}, func(one *index.Brief) error {
		if one.UID != r.user {
			return nil
		}
		if why := c.spared(one.ID, &own); why != "" && why != keptReading { // that is over in a moment
			held, heldBuilds = held+one.LogicalBytes, heldBuilds+1
		} else {
			mayGo += one.LogicalBytes
		}
		if left--; mayGo >= above || left == 0 {
			return errSeen
		}
		return nil
	})
	if err != nil && !errors.Is(err, errSeen) {
		return 0, "", err
	}
	if heldBuilds > 0 {
		stays = fmt.Sprintf("%s of them are pinned, in use or given out lately", bytesText(held))
	}
	return mayGo, stays, nil
}
