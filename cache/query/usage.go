package query

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/dedupe/match"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

const usagePage = 256

// Usage returns the space that the builds take which the peer may see, or those of the entries; for
// two entries also the bytes that they share. Progress may be nil.
func (q *Queries) Usage(ctx context.Context, p rights.Peer, w *wire.Usage,
	progress func(*wire.Progress)) (*wire.UsageReply, error) {
	if w.After != "" {
		return q.usageFrom(ctx, w.After)
	}
	survey, inv, err := q.store.Collector().Inventory(ctx, wire.StoreProgress(progress, "reading"))
	if err != nil {
		return nil, Error(ctx, err)
	}
	u := &wire.UsageReply{}
	// only in the first page, because it takes longer than a page
	if u.Space, err = q.spaceFor(ctx, p); err != nil {
		return nil, err
	}
	var wanted map[index.BuildID]bool
	if len(w.Entries) > 0 {
		wanted = make(map[index.BuildID]bool)
		err := q.EachNamed(ctx, p, w.Entries, func(b *index.Build) error {
			wanted[b.ID] = true
			return nil
		})
		if err != nil {
			return nil, err
		}
		if len(w.Entries) == 2 {
			found, err := q.Find(ctx, p, w.Entries)
			if err != nil {
				return nil, err
			}
			if err := q.compareEntries(ctx, u, w.Entries, found); err != nil {
				return nil, err
			}
		}
	}
	everything := q.rights.IsAdministrator(p)
	seen := make([]*index.Brief, 0, len(survey.Builds))
	list := make([]*index.Brief, 0, len(survey.Builds))
	for i := range survey.Builds {
		b := &survey.Builds[i]
		if !everything && !q.rights.MaySee(p, b.ID, b.Scope) {
			continue // the peer may not see what builds of other users share with its own
		}
		seen = append(seen, b)
		if wanted == nil || wanted[b.ID] {
			list = append(list, b)
		}
	}
	accounts := inv.NewAccounts(seen)
	if wanted == nil {
		bounds, _ := q.store.Bounds() // on an error without a quota
		u.Users = usageSums(accounts.SumsBy(list,
			func(b *index.Brief) string { return fmt.Sprintf("uid:%d", b.UID) }), bounds.User)
		u.Eps = usageSums(accounts.SumsBy(list, func(b *index.Brief) string { return b.EP }), 0)
		err := q.packing.Sharing.EachShare(ctx, func(d cas.Digest, _ packing.Share) error {
			if !everything {
				return errStop
			}
			u.PackableBytes += q.packing.Sharing.Saving(d)
			return nil
		})
		if err != nil && !errors.Is(err, errStop) {
			return nil, Error(ctx, err)
		}
	}
	q.usagePage(u, q.usages.add(accounts.ByModel(list)), 0)
	return u, nil
}

const maxSums = 256

func usageSums(list []evict.Sum, quota int64) (out []*wire.UsageSum) {
	for _, s := range list[:min(len(list), maxSums)] {
		out = append(out, &wire.UsageSum{Name: wire.Clip(s.Name), Builds: s.Builds,
			LogicalBytes: s.Logical, OwnBytes: s.Own, DiskBytes: s.Disk, QuotaBytes: quota})
	}
	return out
}

// usageLists keeps lists that did not fit into one answer, so that all pages are of one survey.
type usageLists struct {
	mu    sync.Mutex
	lists []usageList // oldest first; guarded by mu
}

type usageList struct {
	id   string
	rows []evict.Row
}

const maxLists = 4 // bounds their memory: a list takes about 40 bytes for each build

func (us *usageLists) add(rows []evict.Row) usageList {
	l := usageList{rand.Text(), rows}
	if len(rows) > usagePage {
		us.mu.Lock()
		us.lists = append(us.lists[max(0, len(us.lists)-maxLists+1):len(us.lists):len(us.lists)], l)
		us.mu.Unlock()
	}
	return l
}

func (q *Queries) usageFrom(ctx context.Context, after string) (*wire.UsageReply, error) {
	id, at, _ := strings.Cut(after, "-")
	from, err := strconv.ParseUint(at, 10, 32)
	q.usages.mu.Lock()
	lists := q.usages.lists // never changed in place
	q.usages.mu.Unlock()
	for _, l := range lists {
		if l.id == id && err == nil && from < uint64(len(l.rows)) && ctx.Err() == nil {
			u := &wire.UsageReply{}
			q.usagePage(u, l, int(from))
			return u, nil
		}
	}
	return nil, apierr.New(apierr.BadRequest, nil, "page %.80q has expired", after).
		WithHint("start again with the first page")
}

const maxUsageMembers = 64

// usagePage adds the builds of one page, with shortened fields so that it fits into a frame.
func (q *Queries) usagePage(u *wire.UsageReply, l usageList, from int) {
	to := min(from+usagePage, len(l.rows))
	for _, r := range l.rows[from:to] {
		b, err := q.index.Get(r.ID)
		if err != nil {
			continue // removed in the meantime
		}
		of := q.Listing(&b)
		brief := &wire.Build{Build: of.Build, RequestKey: of.RequestKey,
			ModelDigest: of.ModelDigest, ModelName: wire.Clip(of.ModelName), Ep: wire.Clip(of.Ep),
			Scope: wire.Clip(of.Scope), State: of.State, Pinned: of.Pinned, OwnBytes: r.Own,
			KeptAs: q.Representation(&b), Hits: of.Hits, LastUsedMs: of.LastUsedMs,
			CreatedMs: of.CreatedMs, CompileSeconds: of.CompileSeconds}
		for range min(len(b.Members), maxUsageMembers) {
			brief.Members = append(brief.Members, &wire.Member{})
		}
		u.Builds = append(u.Builds, &wire.BuildUsage{Build: brief, LogicalBytes: r.Logical,
			OwnBytes: r.Own, SharedBytes: r.Shared, OnceBytes: r.Once,
			Shapes: wire.Clip(identity.DimensionsText(&b))})
	}
	if to < len(l.rows) {
		u.Next = l.id + "-" + strconv.Itoa(to)
	}
}

const maxShared = 256

// compareEntries compares the files of two entries by reading them, because equal bytes count at
// any offset.
func (q *Queries) compareEntries(ctx context.Context, u *wire.UsageReply, entries []string,
	found []index.Build) error {
	var files [2][]index.File
	for i, entry := range entries {
		seen := make(map[cas.Digest]bool)
		for j := range found {
			if !found[j].MatchesName(entry) || found[j].Layer != "" {
				continue
			}
			for _, f := range found[j].Blobs() {
				f.Name = cmp.Or(f.Name, "source model")
				if !seen[f.Digest] {
					seen[f.Digest] = true
					files[i] = append(files[i], f)
				}
			}
		}
	}
	for _, f := range files[1] {
		if err := q.compareFile(ctx, u, f, files[0]); err != nil {
			return Error(ctx, err)
		}
	}
	slices.SortFunc(u.Shared, func(a, b *wire.SharedBlob) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Digest, b.Digest),
			cmp.Compare(a.FirstName, b.FirstName))
	})
	u.Shared = u.Shared[:min(len(u.Shared), maxShared)]
	return nil
}

func (q *Queries) compareFile(ctx context.Context, u *wire.UsageReply, f index.File,
	with []index.File) error {
	shares := func(with index.File, bytes int64) {
		u.SharedBytes += bytes
		u.Shared = append(u.Shared, &wire.SharedBlob{Digest: f.Digest.String(), Size: f.Size,
			Bytes: bytes, FirstName: wire.Clip(with.Name), SecondName: wire.Clip(f.Name)})
	}
	if i := slices.IndexFunc(with, func(other index.File) bool {
		return other.Digest == f.Digest
	}); i >= 0 {
		shares(with[i], f.Size)
		return nil
	}
	target, err := q.packing.OpenUnverified(f.Digest)
	if err != nil {
		return err
	}
	defer target.Close() // opened for reading, so no data can be lost
	var candidates []match.Candidate
	for _, other := range with[:min(len(with), dedupe.MaxBases-1)] {
		s, err := q.packing.OpenUnverified(other.Digest)
		if err != nil {
			return err
		}
		defer s.Close() // read-only
		candidates = append(candidates, match.Candidate{Digest: other.Digest, Source: s})
	}
	all := func(context.Context, match.Sketch) ([]match.Candidate, error) { return candidates, nil }
	plan, err := match.Find(ctx, target, all)
	if err != nil {
		return err
	}
	bytes := make(map[cas.Digest]int64)
	for _, e := range plan.Extents {
		bytes[plan.Bases[e.Base].Digest] += e.Length
	}
	for _, other := range with {
		if n := bytes[other.Digest]; n > 0 {
			shares(other, n)
		}
	}
	return nil
}

// RemovalBytes returns how many bytes removing a build would free on the disk now. Bytes shared
// with builds that the peer may not see count as freed, so that the sum does not disclose them.
func (q *Queries) RemovalBytes(p rights.Peer, b *index.Build) (sum int64, err error) {
	if b.Layer != "" {
		return 0, nil
	}
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

// FreedByRemoval is RemovalBytes of removing several builds together. It exceeds the sum of
// RemovalBytes if they share bytes, or if one is a base of another.
func (q *Queries) FreedByRemoval(ctx context.Context, p rights.Peer,
	ids []index.BuildID) (sum int64, err error) {
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
			continue // removed in the meantime
		case err != nil:
			return 0, err
		}
		for d := range q.store.PartsOf(&b) {
			if counted[d] {
				continue
			}
			counted[d] = true
			needs, err := q.store.Needs(d)
			if err != nil {
				return 0, err
			}
			if !slices.ContainsFunc(needs, func(n store.Need) bool {
				return !going[n.Build] && q.rights.MayKnow(p, n.Build)
			}) {
				sum += q.store.DiskBytesOf(d)
			}
		}
	}
	return sum, nil
}

func (q *Queries) othersNeed(p rights.Peer, b *index.Build, d cas.Digest) (bool, error) {
	// not a base of any recipe
	if q.rights.IsAdministrator(p) && len(q.packing.Recipes.Users(d)) == 0 {
		ids, err := q.index.Needs(d)
		return slices.ContainsFunc(ids, func(id index.BuildID) bool { return id != b.ID }), err
	}
	needs, err := q.store.Needs(d)
	return slices.ContainsFunc(needs, func(n store.Need) bool {
		return n.Build != b.ID && q.rights.MayKnow(p, n.Build)
	}), err
}

// spaceFor returns the account of the whole store to administrators. For other users it covers the
// bounds, and the builds that they requested.
func (q *Queries) spaceFor(ctx context.Context, p rights.Peer) (*wire.Space, error) {
	if q.rights.IsAdministrator(p) {
		return q.Space()
	}
	users, err := q.index.Users(ctx)
	if err != nil {
		return nil, Error(ctx, err)
	}
	b, err := q.store.Bounds()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "space")
	}
	own := users[p.UID]
	return &wire.Space{LogicalBytes: own.LogicalBytes, Builds: own.Builds, BudgetBytes: b.Budget,
		FloorBytes: b.Floor, FreeBytes: b.Free}, nil
}

// Space returns the account of the whole store.
func (q *Queries) Space() (*wire.Space, error) {
	b, err := q.store.Bounds()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "space")
	}
	s, held, packed, err := q.consistentSpace()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "space")
	}
	counters := q.index.Counters.All()
	return &wire.Space{LogicalBytes: s.LogicalBytes, UniqueBytes: s.UniqueBytes,
		SavedBySharingBytes: s.LogicalBytes - s.UniqueBytes, Entries: s.Entries, Builds: s.Builds,
		DiskBytes: s.DiskBytes + packed.Recipes + packed.Bases, UnpackedBytes: packed.Copies,
		ManifestBytes: s.ManifestBytes, HeldBytes: held,
		ReservedBytes: q.store.Ledger().Reserved().Disk,
		PinnedBytes:   q.diskOf(q.index.Journal.PinnedBuilds()),
		DeadBytes:     q.diskOf(q.index.Journal.NotServed()), BudgetBytes: b.Budget,
		FloorBytes: b.Floor, FreeBytes: b.Free, Evicted: counters["evicted"],
		Unkept: counters["unkept"], ToLookAt: uint64(q.store.Packer().Remaining())}, nil
}

// consistentSpace reads three accounts as of the same moment as far as possible, because a build
// that is removed between two reads would be counted twice. A blob that is being packed counts with
// its current bytes.
func (q *Queries) consistentSpace() (s index.Space, held int64, packed packing.Space, err error) {
	var before, after spaceFigures
	for range 10 { // if builds are removed all the time, the last result is used
		if before, err = q.spaceFigures(); err != nil {
			return s, 0, packed, err
		}
		if packed, err = q.packing.Space(true); err != nil {
			return s, 0, packed, err
		}
		if after, err = q.spaceFigures(); err != nil {
			return s, 0, packed, err
		}
		if after == before {
			break
		}
	}
	after.space.DiskBytes -= after.excess
	return after.space, after.unlinkedOpen, packed, nil
}

// spaceFigures are figures that change whenever bytes move from one account to another.
type spaceFigures struct {
	space                index.Space
	unlinkedOpen, excess int64
}

func (q *Queries) spaceFigures() (m spaceFigures, err error) {
	if m.space, err = q.index.Space(); err != nil {
		return m, err
	}
	m.unlinkedOpen = q.store.Views().UnlinkedOpenBytes()
	m.excess, err = q.packing.AccountExcess()
	return m, err
}

func (q *Queries) diskOf(ids []index.BuildID) (sum int64) {
	counted := make(map[cas.Digest]bool)
	for _, id := range ids {
		b, err := q.index.Get(id)
		if err != nil {
			continue // removed in the meantime
		}
		for d := range q.store.PartsOf(&b) {
			if !counted[d] {
				counted[d] = true
				sum += q.store.DiskBytesOf(d) // 0 for a missing blob
			}
		}
	}
	return sum
}

// FormText describes the representation of a build's large files.
func (q *Queries) FormText(b *index.Build) string {
	if b.Layer != "" {
		return "in layer " + b.Layer + ", read-only"
	}
	said := make(map[string]int64) // text -> bytes of the files with this representation
	for d, size := range b.DistinctBlobs() {
		if size >= packing.MinBlobSize {
			said[q.blobFormText(d)] += size
		}
	}
	texts := slices.SortedFunc(maps.Keys(said), func(a, b string) int {
		return cmp.Or(cmp.Compare(said[b], said[a]), strings.Compare(a, b))
	})
	for i, text := range texts {
		if len(texts) > 1 {
			texts[i] = bytesize.Text(said[text]) + " " + text
		}
	}
	if len(texts) == 0 {
		return q.Representation(b)
	}
	return strings.Join(texts, "; ")
}

// Representation returns "whole", or "packed" if a file of the build is packed, perhaps with an
// unpacked copy that requests are served from.
func (q *Queries) Representation(b *index.Build) string {
	if b.Layer != "" {
		return "layer"
	}
	word, copied := "whole", false
	for d := range b.DistinctBlobs() {
		if !q.packing.OnlyPacked(d) {
			continue
		}
		_, _, unpacked := q.packing.Bytes(d)
		word, copied = "packed", copied || unpacked > 0
	}
	if copied {
		word += ", with a copy"
	}
	return word
}

func (q *Queries) blobFormText(d cas.Digest) string {
	p, packed := q.packing.Recipes.Has(d)
	if !packed || !q.packing.OnlyPacked(d) {
		return "whole"
	}
	text := fmt.Sprintf("packed: %s of %s are its own", bytesize.Text(p.Own),
		bytesize.Text(p.Size))
	if _, _, unpacked := q.packing.Bytes(d); unpacked > 0 {
		text += ", with an unpacked copy in use"
	}
	return text
}

// FirstEP names the first execution provider of a build, "" if it has none.
func FirstEP(b *index.Build) string {
	if len(b.EPs) == 0 {
		return ""
	}
	return b.EPs[0].Name
}
