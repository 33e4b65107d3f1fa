package cache

import (
	"context"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/index"
)

// inventory is what the blobs of a survey take on the disk in all of their forms, and who needs them. Builds may be taken
// out of it, blobs packed and copies dropped, to see what that would free.
type inventory struct {
	blobs []index.Blob          // those of the survey, then containers that no build needs; Needs counts builds
	forms map[uint32]*blobForms // by place in blobs: of those that are more, or less, than a whole file that only builds need
	at    map[cas.Digest]uint32
}

// blobForms are what a blob has besides its whole form, which may be gone.
type blobForms struct {
	digest           cas.Digest
	recipe, unpacked int64    // bytes on disk; 0: there is none
	takes            []uint32 // the containers of the recipe
	users            int      // recipes that take from it
	saving           int64    // bytes on disk that packing it frees; 0: it is not worth it, or not known
	from             []uint32 // whom it would take from
}

// takeInventory surveys the store. Progress may be nil.
func (c *Cache) takeInventory(ctx context.Context, progress func(Progress)) (*index.Survey, *inventory, error) {
	var (
		recipes  = make(map[cas.Digest]dedupe.Packed)
		unpacked = make(map[cas.Digest]int64)
		shares   = make(map[cas.Digest]forms.Share)
		wanted   = make(map[cas.Digest]struct{})
	)
	err := c.forms.EachPacked(ctx, func(d cas.Digest, p dedupe.Packed) error {
		recipes[d], wanted[d] = p, struct{}{}
		for _, container := range p.Containers {
			wanted[container.Digest] = struct{}{}
		}
		return nil
	})
	if err == nil {
		err = c.forms.EachCopy(ctx, func(d cas.Digest, disk int64) error {
			unpacked[d], wanted[d] = disk, struct{}{}
			return nil
		})
	}
	if err == nil {
		err = c.forms.EachShare(ctx, func(d cas.Digest, s forms.Share) error {
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
	survey, err := c.index.Survey(ctx, wanted, farThrough(progress, "reading"))
	if err != nil {
		return nil, nil, err
	}
	inv := &inventory{blobs: survey.Blobs, forms: make(map[uint32]*blobForms), at: survey.At}
	for d, p := range recipes {
		f := inv.formsOf(d, c)
		f.recipe = p.Disk
		for _, container := range p.Containers {
			of := inv.formsOf(container.Digest, c)
			of.users++
			f.takes = append(f.takes, inv.at[container.Digest])
		}
	}
	for d, disk := range unpacked {
		inv.formsOf(d, c).unpacked = disk
	}
	for d := range shares {
		// Of what no build needs nothing is packed; what has been packed or removed since frees nothing.
		if at, ok := survey.At[d]; ok && inv.blobs[at].Needs > 0 {
			f := inv.formsOf(d, c)
			f.saving = c.forms.Saving(d)
			for _, from := range shares[d].From {
				inv.formsOf(from, c)
				f.from = append(f.from, inv.at[from])
			}
		}
	}
	return survey, inv, nil
}

// formsOf finds what a blob has besides, and takes one in that no build needs.
func (inv *inventory) formsOf(d cas.Digest, c *Cache) *blobForms {
	at, ok := inv.at[d]
	if !ok {
		disk, _ := c.diskBytes(d) // of one that is missing, none
		at = uint32(len(inv.blobs))
		inv.blobs = append(inv.blobs, index.Blob{Disk: disk})
		inv.at[d] = at
	}
	if inv.forms[at] == nil {
		inv.forms[at] = &blobForms{digest: d}
	}
	return inv.forms[at]
}

// bytes is what a blob takes on the disk in all forms, without what its recipe takes from others.
func (inv *inventory) bytes(at uint32) int64 {
	sum := inv.blobs[at].Disk
	if f := inv.forms[at]; f != nil {
		sum += f.recipe + f.unpacked
	}
	return sum
}

// sum is what all of them take.
func (inv *inventory) sum() (sum int64) {
	for at := range inv.blobs {
		sum += inv.bytes(uint32(at))
	}
	return sum
}

// sumOf is what the blobs of some builds take, each once, with what only recipes take from.
func (inv *inventory) sumOf(builds []candidate) (sum int64) {
	counted := make([]bool, len(inv.blobs))
	count := func(at uint32) {
		if !counted[at] {
			counted[at] = true
			sum += inv.bytes(at)
		}
	}
	for i := range builds {
		for _, at := range builds[i].Blobs {
			count(at)
			if f := inv.forms[at]; f != nil {
				for _, container := range f.takes {
					if inv.blobs[container].Needs == 0 {
						count(container)
					}
				}
			}
		}
	}
	return sum
}

// release takes out one build that needs a blob, and tells what that frees: with the last one the blob goes, unless recipes
// take from it, and what its own recipe took from goes if nobody else needs it.
func (inv *inventory) release(at uint32) (freed int64) {
	b := &inv.blobs[at]
	if b.Needs--; b.Needs > 0 {
		return 0
	}
	f := inv.forms[at]
	if f == nil {
		freed, b.Disk = b.Disk, 0
		return freed
	}
	freed = f.recipe + f.unpacked
	f.recipe, f.unpacked, f.saving = 0, 0, 0
	for _, container := range f.takes {
		freed += inv.give(container)
	}
	f.takes = nil
	if f.users == 0 {
		freed += b.Disk
		b.Disk = 0
	}
	return freed
}

// give takes out one recipe that takes from a blob.
func (inv *inventory) give(at uint32) (freed int64) {
	b, f := &inv.blobs[at], inv.forms[at]
	if f.users--; f.users == 0 && b.Needs == 0 {
		freed, b.Disk = b.Disk, 0
	}
	return freed
}

// stands tells that a blob is there whatever becomes of one more build that needs it: others need it, or recipes take from it
// and it has nothing besides.
func (inv *inventory) stands(at uint32) bool {
	f := inv.forms[at]
	return inv.blobs[at].Needs > 0 || f != nil && f.users > 0
}

// mayPack tells whether packing a blob would free something, as it is now.
func (inv *inventory) mayPack(at uint32) bool {
	f := inv.forms[at]
	if f == nil || f.saving <= 0 || f.users > 0 || inv.blobs[at].Disk < f.saving {
		return false
	}
	for _, from := range f.from {
		if inv.blobs[from].Disk == 0 {
			return false // it is going, or packed
		}
	}
	return true
}

// pack replaces the whole form of a blob by a recipe, which takes what it does not free.
func (inv *inventory) pack(at uint32) (freed int64) {
	b, f := &inv.blobs[at], inv.forms[at]
	freed, f.saving = f.saving, 0
	f.recipe, b.Disk = f.recipe+b.Disk-freed, 0
	for _, from := range f.from {
		inv.forms[from].users++
	}
	f.takes = append(f.takes, f.from...)
	return freed
}

// dropCopy removes the unpacked form of a blob.
func (inv *inventory) dropCopy(at uint32) (freed int64) {
	f := inv.forms[at]
	if f == nil {
		return 0
	}
	freed, f.unpacked = f.unpacked, 0
	return freed
}

// perBuild is what a blob takes of each build that needs it: its bytes, and those of what its recipe takes from, in equal parts for
// all builds and recipes that need them.
func (inv *inventory) perBuild(at uint32) float64 {
	b, f := &inv.blobs[at], inv.forms[at]
	if f == nil {
		return float64(b.Disk) / float64(max(b.Needs, 1))
	}
	bytes := inv.part(at)*float64(b.Needs) + float64(f.recipe+f.unpacked)
	for _, container := range f.takes {
		bytes += inv.part(container)
	}
	return bytes / float64(max(b.Needs, 1))
}

// part is the part of a blob's whole form that falls to each build or recipe that needs it.
func (inv *inventory) part(at uint32) float64 {
	b := &inv.blobs[at]
	return float64(b.Disk) / float64(max(int(b.Needs)+inv.forms[at].users, 1))
}
