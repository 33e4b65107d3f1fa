package store

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// These are the outcomes of packing and unpacking.
const (
	PackedNow   = "packed"
	UnpackedNow = "unpacked"
)

// PackOnRequest returns a function that packs one build, or with dryRun reports what that would
// free. The first call looks for what the blobs of all builds share.
func (p *Packer) PackOnRequest(ctx context.Context, dryRun bool) func(b *index.Build) (string,
	int64, error) {
	looked := false
	return func(b *index.Build) (string, int64, error) {
		// read other builds' blobs first, to compare with them; once, because this lists all blobs
		if !looked {
			looked = true
			if err := p.ReadUnknown(ctx); err != nil {
				return "", 0, err
			}
		}
		if err := p.rereadStale(ctx, b); err != nil {
			return "", 0, err
		}
		if why := p.st.WhyInUse(b); why != "" {
			return "kept: " + why, 0, nil
		}
		promised := p.PackSaving(b.ID)
		switch {
		case promised == 0 && p.st.views.NeedsUnpacking(b):
			return "kept: it is packed already", 0, nil
		case promised == 0:
			return "kept: packing would save too little: it shares few bytes with " +
				"other builds", 0, nil
		case dryRun:
			return PackedNow, promised, nil
		}
		freed, err := p.PackBuild(ctx, b.ID)
		if errors.Is(err, packing.ErrInUse) {
			return "kept: a program uses it now", 0, nil
		}
		if errors.Is(err, packing.ErrNoSpace) {
			return "kept: " + KeptNoSpace, 0, nil
		}
		if err == nil && freed == 0 {
			return "kept: another build with the same files is in use", 0, nil
		}
		return PackedNow, freed, err
	}
}

// UnpackOnRequest returns a function that durably replaces one build's recipes by whole files, or
// with dryRun reports how many bytes that would free.
func (p *Packer) UnpackOnRequest(ctx context.Context, dryRun bool) func(b *index.Build) (string,
	int64, error) {
	// with dryRun: blobs that earlier calls would have unpacked
	planned := make(map[cas.Digest]bool)
	return func(b *index.Build) (string, int64, error) {
		packed := make(map[cas.Digest]int64)
		for d, size := range b.DistinctBlobs() {
			if p.st.packing.OnlyPacked(d) && !planned[d] {
				packed[d] = size
			}
		}
		switch {
		case len(packed) == 0:
			return "kept: it is whole", 0, nil
		case dryRun:
			frees, err := p.unpackFrees(b, packed, planned)
			return UnpackedNow, frees, err
		}
		parts, before := p.st.PartsOf(b), make(map[cas.Digest]int64)
		p.st.FreedOf(parts, before)
		for d := range packed {
			if err := p.st.packing.MakeWhole(ctx, d); err != nil {
				return "", p.st.FreedOf(parts, before), err
			}
		}
		if _, err := p.DropCopies(b.ID); err != nil && !errors.Is(err, packing.ErrInUse) {
			return "", p.st.FreedOf(parts, before), err
		}
		return UnpackedNow, p.st.FreedOf(parts, before), nil
	}
}

// unpackFrees returns how many bytes unpacking these blobs after the planned ones would free on the
// disk, usually a negative number, and adds the blobs to planned. Unpacking removes recipes, unused
// copies, and bases that no recipe and no build needs any more.
func (p *Packer) unpackFrees(b *index.Build, packed map[cas.Digest]int64,
	planned map[cas.Digest]bool) (frees int64, err error) {
	held := p.st.WhyInUse(b) != ""
	for d, size := range packed {
		planned[d] = true
		_, recipe, _ := p.st.packing.Bytes(d)
		frees += recipe - cas.RoundUpToBlock(size)
		if !held {
			frees += p.st.DiskBytesOf(d) - recipe
		}
	}
	gone := make(map[cas.Digest]bool)
	for d := range packed {
		recipe, _ := p.st.packing.Recipes.Has(d) // zero if the blob was unpacked in the meantime
		for _, base := range recipe.Bases {
			left := slices.ContainsFunc(p.st.packing.Recipes.Users(base.Digest),
				func(user cas.Digest) bool { return !planned[user] })
			if left || gone[base.Digest] {
				continue
			}
			gone[base.Digest] = true
			needs, err := p.st.index.Needs(base.Digest)
			if err != nil {
				return 0, err
			}
			if len(needs) == 0 {
				frees += p.st.DiskBytesOf(base.Digest)
			}
		}
	}
	return frees, nil
}

// ReadUnknown reads all unread blobs to find the bytes that they share.
func (p *Packer) ReadUnknown(ctx context.Context) error {
	todo, err := p.UnknownBlobs(ctx)
	if err != nil {
		return err
	}
	for _, d := range todo {
		if _, err := p.st.packing.Sharing.Examine(ctx, d, nil); err != nil &&
			(ctx.Err() != nil || !packing.IsMissingOrDamaged(err)) {
			return err
		}
	}
	return nil
}

// rereadStale matches the build's blobs again if an earlier result may be stale, because
// the blobs that they would take bytes from may have been removed.
func (p *Packer) rereadStale(ctx context.Context, b *index.Build) error {
	for d := range b.DistinctBlobs() {
		if err := p.st.packing.Sharing.ReexamineStale(ctx, d, nil); err != nil {
			return err
		}
	}
	return nil
}
