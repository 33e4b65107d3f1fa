package cache

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/index"
)

// Compress packs such builds as Pack does, and then compresses what they have of their own, where that gains and nobody else takes from it, without waiting for
// compress_after. As with Pack, what somebody holds is left alone, and what is pinned is not. With dryRun it tells what would be freed as things are: of
// literals that packing would make first there is no sample.
func (c *Cache) Compress(ctx context.Context, p Peer, names []string, all, dryRun bool, progress func(done, total int64)) ([]PackResult, error) {
	pack := c.packOne(ctx, dryRun)
	return c.eachPacked(ctx, p, names, all, true, progress, func(b *index.Build) (string, int64, error) {
		outcome, frees, err := pack(b)
		if err != nil {
			return outcome, frees, err
		}
		if why := c.busy(b); why != "" {
			return outcome, frees, nil
		}
		more, why, err := c.compressOwn(ctx, b, dryRun)
		switch {
		case more > 0:
			return CompressedNow, frees + more, err
		case err != nil || outcome == PackedNow:
			return outcome, frees, err
		}
		return "kept: " + why, 0, nil
	})
}

// compressOwn compresses what may be of a build's files, and tells how much that frees, or why nothing.
func (c *Cache) compressOwn(ctx context.Context, b *index.Build, dryRun bool) (freed int64, why string, err error) {
	why = "it has too little of its own to compress"
	free := func(ctx context.Context) error { // as long as nobody asks for it
		if held := c.busy(b); held != "" || c.attend.busy(b.ID) {
			return fmt.Errorf("build %s: %w", b.BuildKey, forms.ErrInUse)
		}
		return ctx.Err()
	}
	for d := range distinctBlobs(b) {
		state, x, err := c.forms.CompressingOf(ctx, d)
		if err != nil {
			return freed, why, err
		}
		switch state {
		case forms.IsCompressed:
			why = "it is compressed already"
		case forms.IsDense:
			why = "compressing was tried, and gains too little"
		case forms.IsTakenFrom:
			why = "others take bytes of it, or would when they are packed"
		}
		if state != forms.MayBe {
			continue
		}
		do := c.forms.Compress
		if dryRun {
			do = c.forms.Expected
		}
		one, err := do(ctx, x, free)
		freed += one
		switch {
		case errors.Is(err, forms.ErrInUse):
			why = "somebody has it by now"
		case err != nil:
			return freed, why, err
		case one == 0:
			why = "compressing was tried, and gains too little"
		}
	}
	return freed, why, nil
}
