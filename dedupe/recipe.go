package dedupe

import "github.com/epcached/epcached/cas"

// Extent is a range of one blob whose bytes also stand in another: typically a
// weight tensor that a batch-1 and a batch-4 form have in common.
type Extent struct {
	At     int64      // where the range begins in the blob that is rebuilt, in bytes
	Length int64      // bytes, greater than zero
	Source cas.Digest // the blob, or the recipe's own literals, that holds the bytes
	From   int64      // where the range begins in Source, in bytes
	Name   string     // the tensor, where a container's format tells it, else ""
}

// Recipe rebuilds one packed blob byte for byte: its extents, in order of At,
// cover the blob from 0 to Size without gap or overlap.
type Recipe struct {
	Blob     cas.Digest // the digest of the plain bytes that come out
	Size     int64      // bytes that come out
	Literals int64      // bytes that stand in no container and are kept with the recipe
	Extents  []Extent
}
