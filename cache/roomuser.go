package cache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/views"
)

// errSeen ends a search.
var errSeen = errors.New("seen")

// usersRoom remembers for each user who has come up against the quota how much of the builds may go. Of one who has many builds, all of them in
// use, each new build would have all of them looked at.
type usersRoom struct {
	worth int // so many builds have to be looked at for it: what is found sooner is not remembered

	mu  sync.Mutex
	all map[uint32]*userRoom // guarded by mu
}

// userRoom is what was found out of one user's builds.
type userRoom struct {
	mu         sync.Mutex      // guards the rest; held while they are looked at, and whoever asks for the same meanwhile waits for that
	of         index.UserSpace // those that there were
	until      time.Time       // it is believed
	all        bool            // all of them were looked at, else only so many that enough may go
	mayGo      int64           // logical bytes
	held       int64           // likewise, of builds that may not
	heldBuilds int
}

// maxUsersRoom bounds the users of whom that is remembered.
const maxUsersRoom = 1024

func (u *usersRoom) of(uid uint32) *userRoom {
	u.mu.Lock()
	defer u.mu.Unlock()
	one := u.all[uid]
	if one == nil {
		if u.all == nil || len(u.all) >= maxUsersRoom {
			u.all = make(map[uint32]*userRoom)
		}
		one = &userRoom{}
		u.all[uid] = one
	}
	return one
}

// What was found out is believed while the user's builds are the same ones, and for so many times as long as it took: leases end without a word, and
// nobody is to look for them more than a part of the time.
const (
	believedTimes = 10
	believedMost  = time.Second
	believedFrom  = 1024 // builds; these take some milliseconds
)

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
	found := c.usersRoom.of(r.user)
	found.mu.Lock()
	defer found.mu.Unlock()
	if found.of != users[r.user] || !found.all && found.mayGo < above || !time.Now().Before(found.until) {
		if err := c.lookAtRoom(ctx, r.user, users[r.user], above, found); err != nil {
			return 0, "", err
		}
	}
	if found.heldBuilds > 0 {
		stays = fmt.Sprintf("%s of them are pinned, in use or given out lately", bytesText(found.held))
	}
	return found.mayGo, stays, nil
}

// lookAtRoom looks at a user's builds until enough may go.
func (c *Cache) lookAtRoom(ctx context.Context, uid uint32, of index.UserSpace, enough int64, found *userRoom) error {
	began := time.Now()
	c.flushUses()
	found.of, found.until, found.all, found.mayGo, found.held, found.heldBuilds = of, time.Time{}, false, 0, 0, 0
	var own views.OwnFiles
	left, looked := of.Builds, 0
	err := c.index.EachBrief(ctx, index.BuildID{}, func(one *index.Brief) error {
		if looked++; one.UID != uid {
			return nil
		}
		if why := c.spared(one.ID, &own); why != "" && why != keptReading { // that is over in a moment
			found.held, found.heldBuilds = found.held+one.LogicalBytes, found.heldBuilds+1
		} else {
			found.mayGo += one.LogicalBytes
		}
		if left--; found.mayGo >= enough || left == 0 {
			return errSeen
		}
		return nil
	})
	if err != nil && !errors.Is(err, errSeen) {
		return err
	}
	found.all = found.mayGo < enough
	if looked >= c.usersRoom.worth {
		found.until = time.Now().Add(min(believedTimes*time.Since(began), believedMost))
	}
	return nil
}
