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
// for it, for what is not kept then would have cost the others as well. mayGo is as much as has to, where so much may; stays says why others may not.
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
	if why := c.nothingGoes(); why != "" {
		return 0, why, nil
	}
	return c.lookAtRoom(ctx, r.user, users[r.user].Builds, above)
}

// lookAtRoom looks at a user's builds until enough may be evicted.
func (c *Cache) lookAtRoom(
	ctx context.Context, uid uint32, builds uint64, enough int64,
) (mayGo int64, stays string, err error) {
	var own views.OwnFiles
	var held int64
	err = c.index.EachBrief(ctx, index.BuildID{}, func(one *index.Brief) error {
		if one.UID != uid {
			return nil
		}
		if why := c.spared(one.ID, &own); why != "" && why != keptReading { // that is over in a moment
			held += one.LogicalBytes
		} else {
			mayGo += one.LogicalBytes
		}
		if builds--; mayGo >= enough || builds == 0 {
			return errSeen
		}
		return nil
	})
	if err != nil && !errors.Is(err, errSeen) {
		return 0, "", err
	}
	if held > 0 {
		stays = fmt.Sprintf("%s of them are pinned, in use or given out lately", bytesText(held))
	}
	return mayGo, stays, nil
}
