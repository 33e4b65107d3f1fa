package match

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"math/bits"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

const sketchKeys = 384

// Sketch has the smallest keys of a blob's anchors, to estimate which blobs share bytes without
// reading them. Two blobs that share a run have the keys of its anchors in common. If one of these
// is among the smallest of both, both sketches have it.
type Sketch struct {
	Size int64    // of the blob, in bytes
	Keys []uint64 // ascending, each once
}

// SketchOf reads all of src, on all cores, and returns its sketch.
func SketchOf(ctx context.Context, src dedupe.Source) (Sketch, error) {
	sk := newSketcher()
	// With this level no anchors are kept.
	if err := scanAll(ctx, src, scanOptions{level: 63, sketch: sk}); err != nil {
		return Sketch{}, fmt.Errorf("sketch: %w", err)
	}
	return sk.sketch(src.Size()), nil
}

// sketcher keeps the smallest keys. It collects more than needed and cuts the list when it is full,
// which is faster than a heap.
type sketcher struct {
	keys []uint64
	most uint64 // greater keys are not among the smallest
}

func newSketcher() *sketcher { return &sketcher{most: ^uint64(0)} }

func (s *sketcher) add(key uint64) {
	if key >= s.most {
		return
	}
	s.keys = append(s.keys, key)
	if len(s.keys) >= 4*sketchKeys {
		s.cut()
	}
}

func (s *sketcher) cut() {
	slices.Sort(s.keys)
	s.keys = slices.Compact(s.keys)
	if len(s.keys) >= sketchKeys {
		s.keys = s.keys[:sketchKeys]
		s.most = s.keys[sketchKeys-1]
	}
}

func (s *sketcher) sketch(size int64) Sketch {
	s.cut()
	return Sketch{Size: size, Keys: slices.Clone(s.keys)}
}

// The encoding of a sketch, little-endian, for a value of the index:
//
//	0    1    version, 1
//	1    8    size of the blob
//	9    8 n  keys, ascending
const sketchHead = 9

// sketchVersion is the version of the encoding and of the definition of keys, because only sketches
// with equal definitions can be compared. Any change of the keys of a blob, or of their selection,
// needs another version.
const sketchVersion = 1

// AppendBinary appends the encoding of the sketch, some 3 KiB, to b.
func (s Sketch) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, sketchVersion)
	b = binary.LittleEndian.AppendUint64(b, uint64(s.Size))
	for _, k := range s.Keys {
		b = binary.LittleEndian.AppendUint64(b, k)
	}
	return b, nil
}

// DecodeSketch reads what AppendBinary wrote. Errors are *FormatError, also for
// a sketch of an earlier version, or ErrNewer. The caller makes such a sketch again.
func DecodeSketch(b []byte) (Sketch, error) {
	if len(b) > 0 && b[0] > sketchVersion {
		return Sketch{}, fmt.Errorf("sketch of version %d: %w", b[0], dedupe.ErrNewer)
	}
	if len(b) < sketchHead || b[0] != sketchVersion {
		return Sketch{}, formatError(0, "version", "a sketch of another version")
	}
	n := len(b) - sketchHead
	if n%8 != 0 || n > 8*sketchKeys {
		return Sketch{}, formatError(sketchHead, "keys", fmt.Sprintf("%d bytes", n))
	}
	size := binary.LittleEndian.Uint64(b[1:])
	if size > dedupe.MaxSize {
		return Sketch{}, formatError(1, "size", fmt.Sprint(size))
	}
	s := Sketch{Size: int64(size), Keys: make([]uint64, n/8)}
	for i := range s.Keys {
		at := sketchHead + 8*i
		s.Keys[i] = binary.LittleEndian.Uint64(b[at:])
		if i > 0 && s.Keys[i] <= s.Keys[i-1] {
			return Sketch{}, formatError(at, "keys", "not ascending")
		}
	}
	return s, nil
}

func formatError(offset int, field, reason string) error {
	return &dedupe.FormatError{Offset: int64(offset), Field: field, Reason: reason}
}

const maxRanked = 64

// Candidates selects at most n of the known blobs by how many bytes Find would probably find in
// them: the best one first, then the one that adds most to it, and so on. It omits blobs that share
// no key, and those for which may, which may be nil, is false. Memory does not depend on the number
// of known blobs.
func Candidates(s Sketch, known iter.Seq2[cas.Digest, Sketch], may func(cas.Digest) bool,
	n int) []cas.Digest {
	var best []shared
	for digest, k := range known {
		c := s.common(digest, k)
		if c.count() == 0 || may != nil && !may(digest) {
			continue
		}
		best = append(best, c)
		if len(best) == 2*maxRanked {
			sortShared(best)
			best = best[:maxRanked]
		}
	}
	sortShared(best)
	return pickCandidates(best[:min(len(best), maxRanked)], n)
}

type shared struct {
	digest cas.Digest
	keys   [(sketchKeys + 63) / 64]uint64 // a bit for each key of the sketch
	// scale is the weight of a shared key: more than 1 if the other sketch has fewer keys.
	scale float64
}

func (s Sketch) common(digest cas.Digest, other Sketch) shared {
	c := shared{digest: digest, scale: 1}
	seen := 0
	for i, k := range s.Keys {
		j, found := slices.BinarySearch(other.Keys, k)
		if j == len(other.Keys) && len(other.Keys) == sketchKeys {
			break // the other sketch does not have greater keys, so they are unknown
		}
		seen++
		if found {
			c.keys[i/64] |= 1 << (i % 64)
		}
	}
	if seen > 0 {
		c.scale = float64(len(s.Keys)) / float64(seen)
	}
	return c
}

func (c shared) count() int {
	n := 0
	for _, w := range c.keys {
		n += bits.OnesCount64(w)
	}
	return n
}

func sortShared(all []shared) {
	slices.SortFunc(all, func(a, b shared) int {
		return cmp.Or(cmp.Compare(float64(b.count())*b.scale, float64(a.count())*a.scale),
			a.digest.Compare(b.digest))
	})
}

// pickCandidates repeatedly takes the blob that adds most keys to those taken before, while any
// adds some.
func pickCandidates(all []shared, n int) (taken []cas.Digest) {
	for len(taken) < n && len(all) > 0 {
		sortShared(all)
		first := all[0]
		if first.count() == 0 {
			break
		}
		taken = append(taken, first.digest)
		all = all[1:]
		for i := range all {
			for w := range all[i].keys {
				all[i].keys[w] &^= first.keys[w]
			}
		}
	}
	return taken
}
