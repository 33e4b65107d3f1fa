package store

import (
	"context"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
)

// Inventory surveys the store: builds, and the representations of their blobs. progress may be nil.
func (c *Collector) Inventory(ctx context.Context, progress index.Progress) (*index.Survey,
	*evict.Inventory, error) {
	var (
		recipes  = make(map[cas.Digest]dedupe.Packed)
		unpacked = make(map[cas.Digest]int64)
		shares   = make(map[cas.Digest]packing.Share)
		wanted   = make(map[cas.Digest]struct{})
	)
	err := c.st.packing.Recipes.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		recipes[d], wanted[d] = p, struct{}{}
		for _, base := range p.Bases {
			wanted[base.Digest] = struct{}{}
		}
		return nil
	})
	if err == nil {
		err = c.st.packing.Copies.Each(ctx, func(d cas.Digest, disk int64) error {
			unpacked[d], wanted[d] = disk, struct{}{}
			return nil
		})
	}
	if err == nil {
		err = c.st.packing.Sharing.EachShare(ctx, func(d cas.Digest, s packing.Share) error {
			if s.Little {
				// keep the copy, because the build would soon be requested and unpacked again
				return nil
			}
			shares[d], wanted[d] = s, struct{}{}
			for _, from := range s.From {
				wanted[from] = struct{}{}
			}
			return nil
		})
	}
	if err != nil {
		return nil, nil, err
	}
	survey, err := c.st.index.Survey(ctx, wanted, progress)
	if err != nil {
		return nil, nil, err
	}
	c.st.log.Debug("surveyed", "builds", len(survey.Builds))
	inv := evict.NewInventory(survey, func(d cas.Digest) int64 {
		disk, _ := c.st.WholeBytes(d) // 0 for a missing blob
		return disk
	})
	for d, p := range recipes {
		bases := make([]cas.Digest, len(p.Bases))
		for i := range p.Bases {
			bases[i] = p.Bases[i].Digest
		}
		inv.AddRecipe(d, p.Disk, bases...)
	}
	for d, disk := range unpacked {
		inv.AddCopy(d, disk)
	}
	for d, s := range shares {
		// Only needed blobs are packed. One that was packed or removed since the survey frees no
		// bytes.
		if inv.Needed(d) {
			inv.AddSaving(d, c.st.packing.Sharing.Saving(d), s.From...)
		}
	}
	return survey, inv, nil
}
