package cache

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// Space tells where the space of the whole store goes.
func (c *Cache) Space() (*wire.Space, error) {
	b, err := c.bounds()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "space")
	}
	s, held, packed, err := c.spaceAtOnce()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "space")
	}
	counters := c.index.Counters.All()
	c.places.mu.Lock()
	reserved := c.places.reserved
	c.places.mu.Unlock()
	return &wire.Space{LogicalBytes: s.LogicalBytes, UniqueBytes: s.UniqueBytes,
		SavedBySharingBytes: s.LogicalBytes - s.UniqueBytes, Entries: s.Entries, Builds: s.Builds,
		DiskBytes: s.DiskBytes + packed.Recipes + packed.Containers, UnpackedBytes: packed.Copies,
		ManifestBytes: s.ManifestBytes, HeldBytes: held, ReservedBytes: reserved,
		PinnedBytes: c.diskOf(c.index.Journal.PinnedBuilds()), DeadBytes: c.diskOf(c.index.Journal.NotServed()),
		BudgetBytes: b.budget, FloorBytes: b.floor, FreeBytes: b.free, MaxEntries: b.entries,
		Evicted: counters["evicted"], Unkept: counters["unkept"],
		ToLookAt: uint64(c.sharing.left.Load())}, nil
}

// spaceAtOnce gives what is accounted for in three places as of one moment, as far as that can be had: a build that goes meanwhile would be counted twice,
// by what it takes and by what others have open of it, or are packed with. A blob that is being packed counts as what it takes now.
func (c *Cache) spaceAtOnce() (s index.Space, held int64, packed packing.Space, err error) {
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

// usagePage is how many builds are told at once.
const usagePage = 256

// Usage tells where the space goes: of the builds that the peer may see, or of these entries; of two,
// what they share as well. Progress may be nil.
func (c *Cache) Usage(ctx context.Context, p Peer, w *wire.Usage,
	progress func(Progress)) (*wire.UsageReply, error) {
	if w.After != "" {
		return c.usageFrom(ctx, w.After)
	}
	survey, inv, err := c.takeInventory(ctx, progress)
	if err != nil {
		return nil, searchError(ctx, err)
	}
	u := &wire.UsageReply{}
	if u.Space, err = c.Space(); err != nil { // the first page says it for all, because it takes longer than a page
		return nil, err
	}
	var wanted map[index.BuildID]bool
	if len(w.Entries) > 0 {
		ids, err := c.idsOf(ctx, p, w.Entries)
		if err != nil {
			return nil, err
		}
		wanted = make(map[index.BuildID]bool, len(ids))
		for _, id := range ids {
			wanted[id] = true
		}
		if len(w.Entries) == 2 {
			found, err := c.find(ctx, p, w.Entries)
			if err != nil {
				return nil, err
			}
			if err := c.compareEntries(ctx, u, w.Entries, found); err != nil {
				return nil, err
			}
		}
	}
	everything := c.rights.Administrator(p)
	seen := make([]*index.Brief, 0, len(survey.Builds))
	list := make([]*index.Brief, 0, len(survey.Builds))
	for i := range survey.Builds {
		b := &survey.Builds[i]
		if !everything && !c.rights.MaySee(p, b.ID, b.Scope) {
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
		u.Users = usageSums(accounts.SumsBy(list,
			func(b *index.Brief) string { return fmt.Sprintf("uid:%d", b.UID) }), quota)
		u.Eps = usageSums(accounts.SumsBy(list, func(b *index.Brief) string { return b.EP }), 0)
		err := c.forms.Sharing.EachShare(ctx, func(d cas.Digest, _ packing.Share) error {
			u.PackableBytes += c.forms.Sharing.Saving(d)
			return nil
		})
		if err != nil {
			return nil, searchError(ctx, err)
		}
	}
	c.usagePage(u, c.usages.keep(accounts.ByModel(list)), 0)
	return u, nil
}

// maxSums bounds the users and providers that are told: the largest come first.
const maxSums = 256

func usageSums(list []evict.Sum, quota int64) (out []*wire.UsageSum) {
	for _, s := range list[:min(len(list), maxSums)] {
		out = append(out, &wire.UsageSum{Name: wire.Clip(s.Name), Builds: s.Builds,
			LogicalBytes: s.Logical, OwnBytes: s.Own,
			DiskBytes: s.Disk, QuotaBytes: quota})
	}
	return out
}

// usages remembers the latest lists that did not fit into one answer, so that all pages are of one survey.
type usages struct {
	mu    sync.Mutex
	lists []usageList // oldest first; guarded by mu
}

type usageList struct {
	id   string
	rows []evict.Row
}

// maxLists bounds them: a list takes some 40 bytes for each build.
const maxLists = 4

func (us *usages) keep(rows []evict.Row) usageList {
	l := usageList{newID(), rows}
	if len(rows) > usagePage {
		us.mu.Lock()
		us.lists = append(us.lists[max(0, len(us.lists)-maxLists+1):len(us.lists):len(us.lists)], l)
		us.mu.Unlock()
	}
	return l
}

func (c *Cache) usageFrom(ctx context.Context, after string) (*wire.UsageReply, error) {
	id, at, _ := strings.Cut(after, "-")
	from, err := strconv.ParseUint(at, 10, 32)
	c.usages.mu.Lock()
	defer c.usages.mu.Unlock()
	for _, l := range c.usages.lists {
		if l.id == id && err == nil && from < uint64(len(l.rows)) && ctx.Err() == nil {
			u := &wire.UsageReply{}
			c.usagePage(u, l, int(from))
			return u, nil
		}
	}
	return nil, apierr.New(apierr.BadRequest, nil, "page %.80q is not known any more", after).
		WithHint("ask from the beginning")
}

// maxUsageMembers bounds what is said of a group: how many it has.
const maxUsageMembers = 64

// usagePage adds the builds of a page: of each as much as lets a page fit into a frame.
func (c *Cache) usagePage(u *wire.UsageReply, l usageList, from int) {
	to := min(from+usagePage, len(l.rows))
	for _, r := range l.rows[from:to] {
		b, err := c.index.Get(r.ID)
		if err != nil {
			continue // it has gone meanwhile
		}
		of := c.listing(&b)
		brief := &wire.Build{Build: of.Build, RequestKey: of.RequestKey,
			ModelDigest: of.ModelDigest, ModelName: wire.Clip(of.ModelName), Ep: wire.Clip(of.Ep),
			Scope: wire.Clip(of.Scope), State: of.State, Pinned: of.Pinned, OwnBytes: r.Own,
			KeptAs: c.formWord(&b), Hits: of.Hits, LastUsedMs: of.LastUsedMs,
			CreatedMs: of.CreatedMs, CompileSeconds: of.CompileSeconds}
		for range min(len(b.Members), maxUsageMembers) {
			brief.Members = append(brief.Members, &wire.Member{})
		}
		u.Builds = append(u.Builds, &wire.BuildUsage{Build: brief, LogicalBytes: r.Logical,
			OwnBytes: r.Own, SharedBytes: r.Shared, OnceBytes: r.Once,
			Shapes: wire.Clip(identity.Shapes(&b))})
	}
	if to < len(l.rows) {
		u.Next = l.id + "-" + strconv.Itoa(to)
	}
}
