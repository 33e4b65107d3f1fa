package cache

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/space"
)

// SpaceReport is where the space goes, of the whole store. Bytes on disk are in whole blocks, as the file system says.
type SpaceReport struct {
	index.Space
	Held, Reserved  int64 // on disk: of removed builds that are open still, and set aside for what is being stored
	Pinned, Dead    int64 // on disk, of builds that are pinned, and of those that are not served
	Budget, Floor   int64 // 0: none
	MaxEntries      uint64
	Free            int64 // of the file system
	Packed          forms.Space
	Evicted, Unkept uint64
	ToLookAt        uint64 // blobs of which is not known yet what they share
}

// Space tells where the space goes.
func (c *Cache) Space() (SpaceReport, error) {
	b, err := c.bounds()
	if err != nil {
		return SpaceReport{}, refusal.New(refusal.Internal, err, "space")
	}
	s, held, packed, err := c.spaceAtOnce()
	if err != nil {
		return SpaceReport{}, refusal.New(refusal.Internal, err, "space")
	}
	counters := c.index.Counters()
	r := SpaceReport{Space: s, Packed: packed, Held: held, Budget: b.budget, Floor: b.floor, MaxEntries: b.entries, Free: b.free,
		Evicted: counters["evicted"], Unkept: counters["unkept"], ToLookAt: uint64(c.sharing.left.Load())}
	c.places.mu.Lock()
	r.Reserved = c.places.reserved
	c.places.mu.Unlock()
	r.Pinned = c.diskOf(c.index.PinnedBuilds())
	r.Dead = c.diskOf(c.index.NotServed())
	return r, nil
}

// spaceAtOnce gives what is accounted for in three places as of one moment, as far as that can be had: a build that goes meanwhile would be counted twice,
// by what it takes and by what others have open of it, or are packed with. A blob that is being packed counts as what it takes now.
func (c *Cache) spaceAtOnce() (s index.Space, held int64, packed forms.Space, err error) {
	var before, after moment
	for range 10 { // always something going: as near as it gets
		if before, err = c.moment(); err != nil {
			return s, 0, packed, err
		}
		if packed, err = c.forms.Space(true); err != nil {
			return s, 0, packed, err
		}
		if after, err = c.moment(); err != nil {
			return s, 0, packed, err
		}
		if after == before {
			break
		}
	}
	after.space.DiskBytes -= after.ahead
	return after.space, after.held, packed, nil
}

// moment is what changes whenever something goes from one account to another.
type moment struct {
	space       index.Space
	held, ahead int64
}

func (c *Cache) moment() (m moment, err error) {
	if m.space, err = c.index.Space(); err != nil {
		return m, err
	}
	m.held = c.views.HeldBytes()
	m.ahead, err = c.forms.Ahead()
	return m, err
}

// diskOf sums what the blobs of some builds take, and those that they are packed with, each once.
func (c *Cache) diskOf(ids []index.BuildID) (sum int64) {
	counted := make(map[cas.Digest]bool)
	for _, id := range ids {
		b, err := c.index.Get(id)
		if err != nil {
			continue // it has just gone
		}
		for d := range c.partsOf(&b) {
			if !counted[d] {
				counted[d] = true
				sum += c.takenBy(d) // of one that is missing, none
			}
		}
	}
	return sum
}

// Usage tells where the space goes, build by build.
type Usage struct {
	Builds      []BuildUsage // by model, the largest first
	Users, EPs  []UsageSum   // by what they take, the largest first
	Shared      []SharedBlob // of two entries: which files have bytes in common, the most first
	SharedBytes int64        // bytes of the second entry's files that the first's have as well
	Packable    int64        // on disk: what packing would free of all builds, as far as is known; 0 with entries
}

// BuildUsage is what one build takes.
type BuildUsage struct {
	Listing
	Logical     int64 // bytes of its files and its copied source model
	Own, Shared int64 // on disk: what its removal would free now, and what other builds need as well
	Once        int64 // of Shared, what no build of its model that is listed before has
}

// UsageSum is what a user's builds take ("uid:1000"), or those of an execution provider.
type UsageSum struct {
	space.Sum
	Quota int64 // logical bytes; 0: none
}

// SharedBlob is a file of one entry that has bytes in common with one of another.
type SharedBlob struct {
	Digest        cas.Digest // of the second's file
	Size          int64      // of the second's file
	Bytes         int64      // of it that stand in the first's file as well, at whatever offsets; all of it where both are one blob
	First, Second string     // what the one calls it, and the other
}

// usagePage is how many builds are told at once.
const usagePage = 256

// Usage tells where the space goes: of the builds that the peer may see, or of these entries; of two, what they share as well. after is what the
// call before gave as next, "" where that was all. Progress may be nil.
func (c *Cache) Usage(ctx context.Context, p Peer, entries []string, after string, progress func(Progress)) (u *Usage, next string, err error) {
	if after != "" {
		return c.usageFrom(ctx, after)
	}
	survey, inv, err := c.takeInventory(ctx, progress)
	if err != nil {
		return nil, "", searchError(ctx, err)
	}
	var wanted map[index.BuildID]bool
	u = &Usage{}
	if len(entries) > 0 {
		ids, err := c.idsOf(ctx, p, entries)
		if err != nil {
			return nil, "", err
		}
		wanted = make(map[index.BuildID]bool, len(ids))
		for _, id := range ids {
			wanted[id] = true
		}
		if len(entries) == 2 {
			found, err := c.find(ctx, p, entries)
			if err != nil {
				return nil, "", err
			}
			if err := u.compare(ctx, c, entries, found); err != nil {
				return nil, "", err
			}
		}
	}
	everything := c.Administrator(p)
	seen := make([]*index.Brief, 0, len(survey.Builds))
	list := make([]*index.Brief, 0, len(survey.Builds))
	for i := range survey.Builds {
		b := &survey.Builds[i]
		if !everything && !c.maySee(p, &index.Build{ID: b.ID, Scope: b.Scope}) {
			continue // what others share with the peer's builds is not the peer's to know
		}
		seen = append(seen, b)
		if wanted == nil || wanted[b.ID] {
			list = append(list, b)
		}
	}
	accounts := inv.Account(seen)
	if wanted == nil {
		quota := int64(0)
		if b, err := c.bounds(); err == nil { // else none is told
			quota = b.user
		}
		for _, sum := range accounts.SumsBy(list, func(b *index.Brief) string { return fmt.Sprintf("uid:%d", b.UID) }) {
			u.Users = append(u.Users, UsageSum{sum, quota})
		}
		for _, sum := range accounts.SumsBy(list, func(b *index.Brief) string { return b.EP }) {
			u.EPs = append(u.EPs, UsageSum{Sum: sum})
		}
		err := c.forms.EachShare(ctx, func(d cas.Digest, _ forms.Share) error {
			u.Packable += c.forms.Saving(d)
			return nil
		})
		if err != nil {
			return nil, "", searchError(ctx, err)
		}
	}
	rows := c.usages.keep(accounts.ByModel(list))
	u.Builds, next = c.usagePage(rows, 0)
	return u, next, nil
}

// usages remembers the latest lists that did not fit into one answer, so that all pages are of one survey.
type usages struct {
	mu    sync.Mutex
	lists []usageList // oldest first; guarded by mu
}

type usageList struct {
	id   string
	rows []space.Row
}

// maxLists bounds them: a list takes some 40 bytes for each build.
const maxLists = 4

func (us *usages) keep(rows []space.Row) usageList {
	l := usageList{newID(), rows}
	if len(rows) > usagePage {
		us.mu.Lock()
		us.lists = append(us.lists[max(0, len(us.lists)-maxLists+1):len(us.lists):len(us.lists)], l)
		us.mu.Unlock()
	}
	return l
}

func (c *Cache) usageFrom(ctx context.Context, after string) (*Usage, string, error) {
	id, at, _ := strings.Cut(after, "-")
	from, err := strconv.ParseUint(at, 10, 32)
	c.usages.mu.Lock()
	defer c.usages.mu.Unlock()
	for _, l := range c.usages.lists {
		if l.id == id && err == nil && from < uint64(len(l.rows)) && ctx.Err() == nil {
			u := &Usage{}
			var next string
			u.Builds, next = c.usagePage(l, int(from))
			return u, next, nil
		}
	}
	return nil, "", refusal.New(refusal.BadRequest, nil, "page %.80q is not known any more", after).WithHint("ask from the beginning")
}

func (c *Cache) usagePage(l usageList, from int) (out []BuildUsage, next string) {
	to := min(from+usagePage, len(l.rows))
	for _, r := range l.rows[from:to] {
		b, err := c.index.Get(r.ID)
		if err != nil {
			continue // it has gone meanwhile
		}
		listing := c.listing(b)
		listing.KeptAs = c.formWord(&b)
		out = append(out, BuildUsage{Listing: listing, Logical: r.Logical, Own: r.Own, Shared: r.Shared, Once: r.Once})
	}
	if to < len(l.rows) {
		next = l.id + "-" + strconv.Itoa(to)
	}
	return out, next
}
