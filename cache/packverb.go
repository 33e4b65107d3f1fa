package cache

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// The outcomes of packing and unpacking.
const (
	PackedNow   = "packed"
	UnpackedNow = "unpacked"
)

// Pack keeps the builds that the names mean, or all that the peer may change, as recipes, as far as that saves something and nobody holds
// them. With dryRun it looks for what they share, and tells what would be freed. progress, which may be nil, counts builds.
func (c *Cache) Pack(ctx context.Context, p Peer, names []string, all, dryRun bool,
	progress func(done, total int64)) (*wire.PackReply, error) {
	return c.eachPacked(ctx, p, names, all, true, progress, c.packOne(ctx, dryRun))
}

// packLater tells of a build that stays as it is what packing would free of it, if it stays because somebody has it, or may have.
func (c *Cache) packLater(b *index.Build, outcome string) int64 {
	if !strings.HasPrefix(outcome, "kept: ") || c.store.Busy(b) == "" {
		return 0
	}
	return c.store.Packer().PackSaving(b.ID)
}

// packOne packs one build after the other.
func (c *Cache) packOne(ctx context.Context, dryRun bool) func(b *index.Build) (string, int64, error) {
	looked := false
	return func(b *index.Build) (string, int64, error) {
		if !looked { // of others' blobs first, or there would be nothing to compare with; once, for it reads which blobs there are
			looked = true
			if err := c.lookAtUnknown(ctx); err != nil {
				return "", 0, err
			}
		}
		if err := c.lookAgain(ctx, b); err != nil {
			return "", 0, err
		}
		if why := c.store.Busy(b); why != "" {
			return "kept: " + why, 0, nil
		}
		promised := c.store.Packer().PackSaving(b.ID)
		switch {
		case promised == 0 && c.views.Unpacks(b):
			return "kept: it is packed already", 0, nil
		case promised == 0:
			return "kept: it shares too little with others that it could take from, and repeats too little of itself", 0, nil
		case dryRun:
			return PackedNow, promised, nil
		}
		freed, err := c.store.Packer().PackBuild(ctx, b.ID)
		if errors.Is(err, packing.ErrInUse) {
			return "kept: somebody has it by now", 0, nil
		}
		if errors.Is(err, packing.ErrNoRoom) {
			return "kept: " + store.KeptNoRoom, 0, nil
		}
		if err == nil && freed == 0 {
			return "kept: another build that has the same files is in use", 0, nil
		}
		return PackedNow, freed, err
	}
}

// Unpack makes such builds whole again, durably, and gives up their recipes. They may be packed again when they are cold.
func (c *Cache) Unpack(ctx context.Context, p Peer, names []string, all, dryRun bool,
	progress func(done, total int64)) (*wire.PackReply, error) {
	planned := make(map[cas.Digest]bool) // with dryRun: what would be whole by then
	return c.eachPacked(ctx, p, names, all, false, progress, func(b *index.Build) (string, int64, error) {
		packed := make(map[cas.Digest]int64)
		for d, size := range store.DistinctBlobs(b) {
			if c.forms.OnlyPacked(d) && !planned[d] {
				packed[d] = size
			}
		}
		switch {
		case len(packed) == 0:
			return "kept: it is whole", 0, nil
		case dryRun:
			frees, err := c.unpackFrees(b, packed, planned)
			return UnpackedNow, frees, err
		}
		parts, before := c.store.PartsOf(b), make(map[cas.Digest]int64)
		c.store.FreedOf(parts, before)
		for d := range packed {
			if err := c.forms.MakeWhole(ctx, d); err != nil {
				return "", c.store.FreedOf(parts, before), err
			}
		}
		if _, err := c.store.Packer().DropCopies(b.ID); err != nil && !errors.Is(err, packing.ErrInUse) {
			return "", c.store.FreedOf(parts, before), err
		}
		return UnpackedNow, c.store.FreedOf(parts, before), nil
	})
}

// unpackFrees tells what it would free on the disk, mostly less than 0, if these packed blobs of a build became whole after those that are planned, and adds
// them to these: recipes go, copies that nobody has, and containers that no recipe takes from any more and no build needs.
func (c *Cache) unpackFrees(b *index.Build, packed map[cas.Digest]int64, planned map[cas.Digest]bool) (frees int64, err error) {
	held := c.store.Busy(b) != ""
	for d, size := range packed {
		planned[d] = true
		_, recipe, _ := c.forms.Bytes(d)
		frees += recipe - cas.OnDisk(size)
		if !held {
			frees += c.store.DiskBytesOf(d) - recipe
		}
	}
	gone := make(map[cas.Digest]bool)
	for d := range packed {
		p, _ := c.forms.Recipes.Has(d) // of one that has become whole meanwhile, nothing
		for _, container := range p.Containers {
			left := slices.ContainsFunc(c.forms.Recipes.Users(container.Digest), func(user cas.Digest) bool { return !planned[user] })
			if left || gone[container.Digest] {
				continue
			}
			gone[container.Digest] = true
			needs, err := c.index.Needs(container.Digest)
			if err != nil {
				return 0, err
			}
			if len(needs) == 0 {
				frees += c.store.DiskBytesOf(container.Digest)
			}
		}
	}
	return frees, nil
}

func (c *Cache) eachPacked(ctx context.Context, p Peer, names []string, all, packs bool,
	progress func(done, total int64), do func(*index.Build) (string, int64,
		error)) (*wire.PackReply, error) {
	ids, err := c.toPack(ctx, p, names, all)
	if err != nil {
		return nil, err
	}
	out, done := &wire.PackReply{}, int64(0)
	err = c.eachOf(ctx, ids, func(b *index.Build) error {
		if progress != nil {
			progress(done, int64(len(ids)))
		}
		done++
		outcome, frees, err := do(b)
		switch {
		case ctx.Err() != nil:
			return apierr.New(apierr.Cancelled, ctx.Err(), "pack")
		case err != nil && c.isGone(b.ID): // collected or removed meanwhile
			outcome, frees = "kept: "+store.KeptGone, 0
		case packing.Lost(err):
			outcome = "kept: " + c.store.WithholdDamaged(ctx, b, err)
		case err != nil:
			return storeError(err, b.ModelName)
		}
		later := int64(0)
		if err == nil && packs {
			later = c.packLater(b, outcome)
		}
		out.FreedBytes += frees
		out.LaterBytes += later
		if outcome == PackedNow || outcome == UnpackedNow {
			out.Changed++
		}
		if len(out.Builds) == maxChanged { // each takes less than 2 KiB
			out.More++
			return nil
		}
		out.Builds = append(out.Builds, &wire.PackedBuild{Build: b.BuildKey.String(),
			ModelName: wire.Clip(b.ModelName), Ep: wire.Clip(query.FirstEP(b)), Scope: b.Scope,
			Outcome: wire.Clip(outcome), FreesBytes: frees, LaterBytes: later})
		return nil
	})
	return out, err
}

// toPack lists the builds.
func (c *Cache) toPack(ctx context.Context, p Peer, names []string, all bool) ([]index.BuildID, error) {
	switch {
	case all && len(names) > 0:
		return nil, apierr.New(apierr.BadRequest, nil, "pack: all builds, or those that are named")
	case !all && len(names) == 0:
		return nil, apierr.New(apierr.BadRequest, nil, "pack: no build is named")
	case !all:
		return c.changeable(ctx, p, names)
	}
	return c.allChangeable(ctx, p)
}

// lookAtUnknown finds out what blobs share of which that is not known.
func (c *Cache) lookAtUnknown(ctx context.Context) error {
	todo, err := c.store.Packer().Unknown(ctx)
	if err != nil {
		return err
	}
	for _, d := range todo {
		if _, err := c.forms.Sharing.LookAt(ctx, d, nil); err != nil && (ctx.Err() != nil || !packing.Lost(err)) {
			return err
		}
	}
	return nil
}

// lookAgain finds out what the build's blobs share where that was known once, and perhaps is gone since: what they would have taken from may not be
// there any more.
func (c *Cache) lookAgain(ctx context.Context, b *index.Build) error {
	for d := range store.DistinctBlobs(b) {
		if err := c.forms.Sharing.LookAgain(ctx, d, nil); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cache) isGone(id index.BuildID) bool {
	_, err := c.index.Get(id)
	return errors.Is(err, index.ErrNotFound)
}
