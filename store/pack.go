package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// PackBuild packs the blobs of a build that share bytes with others, even if that frees few, and
// drops its views. It returns how many bytes it freed on the disk. Blobs that are not worth packing
// stay whole, which is no error. It fails with packing.ErrInUse, and does nothing, if the build is
// in use. It reads the blobs and their bases a few times. If ctx ends, each blob is whole or
// completely packed.
func (p *Packer) PackBuild(ctx context.Context, id index.BuildID) (freed int64, err error) {
	return p.packBlobs(id, func(d cas.Digest) (int64, error) {
		return p.st.packing.Pack(ctx, d, packing.Little, nil)
	})
}

// PackBuildWith is PackBuild for only those blobs that save much, that are no base of a recipe, and
// that only builds need which are cold according to when. It calls gate before each piece that it
// reads.
func (p *Packer) PackBuildWith(ctx context.Context, id index.BuildID, when Packing,
	gate packing.Gate) (freed int64, err error) {
	return p.packBlobs(id, func(d cas.Digest) (int64, error) {
		if ok, err := p.allCold(d, when); !ok || err != nil ||
			len(p.st.packing.Recipes.Users(d)) > 0 {
			return 0, err
		}
		return p.st.packing.Pack(ctx, d, packing.Worth, gate)
	})
}

func (p *Packer) packBlobs(id index.BuildID, pack func(cas.Digest) (int64, error)) (freed int64,
	err error) {
	b, err := p.st.index.Get(id)
	if err != nil {
		return 0, err
	}
	if why := p.st.WhyInUse(&b); why != "" {
		return 0, fmt.Errorf("build %s: %w: %s", b.BuildKey, packing.ErrInUse, why)
	}
	for d := range b.DistinctBlobs() {
		one, err := pack(d)
		freed += one
		if err != nil && !errors.Is(err, packing.ErrInUse) {
			return freed, fmt.Errorf("pack build %s: %w", b.BuildKey, err)
		}
	}
	return freed, nil
}

// PackSaving estimates how many bytes PackBuild would free on the disk, without reading a blob. It
// returns 0 if the shared bytes are unknown yet, no blob is worth packing, or the build is packed.
func (p *Packer) PackSaving(id index.BuildID) int64 {
	b, err := p.st.index.Get(id)
	if err != nil {
		return 0
	}
	sum := int64(0)
	for d := range b.DistinctBlobs() {
		sum += p.st.packing.Sharing.Saving(d)
	}
	return sum
}

// DropCopies removes the unpacked copies of a build that is not in use, with its view, and returns
// the bytes on disk that it freed. The next request for the build unpacks it again.
func (p *Packer) DropCopies(id index.BuildID) (freed int64, err error) {
	b, err := p.st.index.Get(id)
	if err != nil {
		return 0, err
	}
	for d := range b.DistinctBlobs() {
		_, _, disk := p.st.packing.Bytes(d)
		if disk == 0 {
			continue
		}
		if err := p.st.packing.DropCopy(d); err != nil {
			return freed, fmt.Errorf("build %s: %w", b.BuildKey, err)
		}
		freed += disk
	}
	return freed, nil
}

// WhyInUse returns why the view of a build may not be removed, "" if it may.
func (st *Store) WhyInUse(b *index.Build) string {
	v, done := st.views.BorrowFor(b)
	if v == nil {
		return ""
	}
	defer done()
	if held, err := v.Leased(); held || err != nil {
		return KeptInUse // if it cannot be checked, it stays
	}
	if until := v.PathGraceEnd(); st.now().Before(until) {
		until = until.Add(time.Second - 1) // rounded up to a whole second
		return "it was served recently, perhaps by path: it is kept until " +
			"" + until.UTC().Format(time.RFC3339)
	}
	return ""
}

// Seeds opens at most n whole blobs of shared builds that probably share bytes with a file that has
// this sketch, the best first. The caller closes them. It is best effort.
func (p *Packer) Seeds(ctx context.Context, sketch []byte, n int) (files []*os.File) {
	near, err := p.st.packing.Sharing.Near(ctx, sketch, func(d cas.Digest) bool {
		scopes, err := blobOwner{p.st}.scopesOf(d)
		_, shared := scopes["shared"]
		return shared && err == nil
	}, n)
	if err != nil {
		p.st.log.Debug("seeds not found", "error", err)
	}
	for _, d := range near {
		if f, err := p.st.cas.Open(ctx, d); err == nil { // otherwise it was just removed
			files = append(files, f)
		}
	}
	return files
}
