// Package dedupe stores the recipes of packed blobs, and restores the blobs byte for byte. Package
// match finds the bytes that blobs share.
//
// A Recipe restores a packed blob from extents: ranges of other blobs, its bases, which are whole
// in the store. The bytes that no other blob has, the recipe's literals, are a base too, which
// later recipes may use; earlier versions also compressed them in the recipe's own file (Frames).
// A base is never packed itself. A repeated short run, such as zeros, is one extent with a period.
// doc/format.md has the bytes of a recipe.
//
// Stored recipes are not trusted: DecodeRecipe accepts only consistent ones, and Apply hashes the
// result, so a wrong extent or base may cost a compile but never produces a wrong artefact. With
// ApplyOptions.Trusted, which is for verified recipes and bases with valid stamps, Apply does not
// hash.
//
// The package is safe for concurrent use, also of the same Recipe, because no function changes it.
// Start with Recipe, Apply and RecipeStore.
package dedupe

import (
	"errors"
	"fmt"
	"strings"

	"github.com/epcached/epcached/cas"
)

// Limits of a recipe. They bound the memory of reading one to about 50 MB. match.Find omits short
// matches if a plan would exceed them.
const (
	MaxExtents = 1 << 19
	MaxBases   = 256
	MaxSize    = 1 << 56 // bytes of a blob
)

// Base is a blob that is whole in the store and that recipes take
// bytes from. It is never packed itself.
type Base struct {
	Digest cas.Digest
	Size   int64 // bytes of the whole blob
}

// Extent is a range of one blob with bytes that are in a base: for example the weights that the
// builds of a model for batch 1 and batch 4 share.
type Extent struct {
	At     int64 // offset in the restored blob
	Length int64 // bytes, greater than zero
	From   int64 // offset in the base
	// Period, if not 0, is the number of bytes in the base, less than Length, that are repeated.
	Period int64
	// Base is an index in Recipe.Bases or Plan.Bases; their number means Recipe.Frames.
	Base int
}

func (e Extent) baseBytes() int64 {
	if e.Period > 0 {
		return e.Period
	}
	return e.Length
}

// NoLiterals is the value of Recipe.Literals if no base has literals.
const NoLiterals = -1

// Recipe restores one packed blob byte for byte: its extents, in order of At, cover the blob from 0
// to Size without gap or overlap.
type Recipe struct {
	Blob  cas.Digest // digest of the restored blob
	Size  int64      // bytes of the restored blob
	Bases []Base
	// Literals is the index of the base with this recipe's literals, or NoLiterals.
	Literals int
	Extents  []Extent
	// Frames has literals in the recipe's own file, of an earlier version; nil: none. With Frames,
	// Literals is NoLiterals.
	Frames *Frames
}

// Validate returns a *FormatError unless the recipe is consistent: its extents cover the blob and
// are inside their bases; limits hold; no base is the blob, listed twice, or unused.
func (r *Recipe) Validate() error {
	if r.Size < 0 || r.Size > MaxSize {
		return invalid("size", "%d bytes", r.Size)
	}
	if err := r.validateBases(); err != nil {
		return err
	}
	if len(r.Extents) > MaxExtents {
		return invalid("extents", "%d of them, more than %d", len(r.Extents), MaxExtents)
	}
	used := make([]bool, r.sources())
	at := int64(0)
	for i, e := range r.Extents {
		if err := r.validateExtent(i, e, at); err != nil {
			return err
		}
		used[e.Base] = true
		at += e.Length
	}
	if at != r.Size {
		return invalid("extents", "they end at %d, the blob at %d", at, r.Size)
	}
	for i, u := range used {
		if !u {
			return invalid(fmt.Sprintf("base %d", i), "no extent uses it")
		}
	}
	return nil
}

func (r *Recipe) validateBases() error {
	if len(r.Bases) > MaxBases {
		return invalid("bases", "%d of them, more than %d", len(r.Bases), MaxBases)
	}
	seen := make(map[cas.Digest]bool, len(r.Bases))
	for i, c := range r.Bases {
		field := fmt.Sprintf("base %d", i)
		switch {
		case c.Digest == r.Blob:
			return invalid(field, "it is the blob itself")
		case c.Digest.IsZero():
			return invalid(field, "no digest")
		case seen[c.Digest]:
			return invalid(field, "it is listed twice")
		case c.Size <= 0 || c.Size > MaxSize:
			return invalid(field, "%d bytes", c.Size)
		}
		seen[c.Digest] = true
	}
	if r.Literals < NoLiterals || r.Literals >= len(r.Bases) {
		return invalid("literals", "base %d of %d", r.Literals, len(r.Bases))
	}
	return nil
}

// validateExtent checks extent i, which must begin at at, the end of the previous one.
func (r *Recipe) validateExtent(i int, e Extent, at int64) *FormatError {
	reason := ""
	switch {
	case e.Base < 0 || e.Base >= r.sources():
		reason = fmt.Sprintf("base %d of %d", e.Base, r.sources())
	case e.At > at:
		reason = fmt.Sprintf("a gap: it begins at %d, the previous one ends at %d", e.At, at)
	case e.At < at:
		reason = fmt.Sprintf("an overlap: it begins at %d, the previous one ends at %d", e.At, at)
	case e.Length <= 0 || e.Length > r.Size-at:
		reason = fmt.Sprintf("%d bytes at %d of %d", e.Length, at, r.Size)
	case e.Period < 0 || e.Period >= e.Length:
		reason = fmt.Sprintf("a period of %d in %d bytes", e.Period, e.Length)
	case e.From < 0 || e.baseBytes() > r.sizeOf(e.Base) ||
		e.From > r.sizeOf(e.Base)-e.baseBytes():
		reason = fmt.Sprintf("bytes %d+%d of a base of %d", e.From, e.baseBytes(), r.sizeOf(e.Base))
	default:
		return nil
	}
	return invalid(fmt.Sprintf("extent %d", i), "%s", reason)
}

func (r *Recipe) sources() int {
	if r.Frames != nil {
		return len(r.Bases) + 1
	}
	return len(r.Bases)
}

func (r *Recipe) sizeOf(i int) int64 {
	if i == len(r.Bases) {
		return r.Frames.size
	}
	return r.Bases[i].Size
}

func invalid(field, format string, args ...any) *FormatError {
	return &FormatError{Offset: -1, Field: field, Reason: fmt.Sprintf(format, args...)}
}

// BytesPerBase returns how many bytes of the blob come from each base, in the order of
// Bases, and then from frames if there are any. A repeated range counts with all its bytes.
func (r *Recipe) BytesPerBase() []int64 {
	taken := make([]int64, r.sources())
	for _, e := range r.Extents {
		taken[e.Base] += e.Length
	}
	return taken
}

// ErrNewer says that a recipe or sketch was written by a newer epcached. It is not damaged, and
// must not be removed.
var ErrNewer = errors.New("written by a newer epcached")

// FormatError says what is wrong with a recipe or a sketch, and where.
type FormatError struct {
	Offset int64  // in the file, of the field at fault; -1 for a Recipe in memory
	Field  string // such as "extent 3: from"; "" for the file as a whole
	Reason string // what was found, and what was expected
}

func (e *FormatError) Error() string {
	var b strings.Builder
	if e.Offset >= 0 {
		fmt.Fprintf(&b, "offset %d: ", e.Offset)
	}
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Reason)
	return b.String()
}

// BaseError says that a base has changed since the recipe was made, or could not be opened or read.
// Err may be a *cas.CorruptError or cas.ErrNotFound.
type BaseError struct {
	Digest cas.Digest // of the base
	Err    error
}

func (e *BaseError) Error() string { return fmt.Sprintf("base %s: %v", e.Digest, e.Err) }

func (e *BaseError) Unwrap() error { return e.Err }
