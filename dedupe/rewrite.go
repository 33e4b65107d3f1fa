package dedupe

import (
	"cmp"
	"fmt"
	"slices"
	"sort"

	"github.com/epcached/epcached/cas"
)

// Range is a part of a container that recipes need.
type Range struct{ From, Length int64 } // bytes

// Needed returns what recipes need of a container, in order, without overlaps
// or neighbours: whatever stands outside may go.
func Needed(container cas.Digest, recipes []*Recipe) []Range {
	var all []Range
	for _, r := range recipes {
		r.Needs(func(c cas.Digest, from, length int64) {
			if c == container {
				all = append(all, Range{from, length})
			}
		})
	}
	slices.SortFunc(all, func(a, b Range) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(b.Length, a.Length)) })
	out := all[:0]
	for _, one := range all {
		if n := len(out); n > 0 && one.From <= out[n-1].From+out[n-1].Length {
			out[n-1].Length = max(out[n-1].Length, one.From+one.Length-out[n-1].From)
			continue
		}
		out = append(out, one)
	}
	return out
}

// Kept returns the bytes of those ranges, one behind the other: what a
// container is rewritten to.
func Kept(container Source, ranges []Range) Source {
	l := &literalSource{target: container}
	for _, r := range ranges {
		l.ranges = append(l.ranges, Extent{At: l.size, From: r.From, Length: r.Length})
		l.size += r.Length
	}
	return l
}

// Moved returns the recipe with another container in the place of one, of which
// it has the ranges that Needed gave. The error is a *FormatError.
func (r *Recipe) Moved(from cas.Digest, to Container, ranges []Range) (*Recipe, error) {
	at := make([]int64, len(ranges)) // of each range in the new container
	for i := 1; i < len(ranges); i++ {
		at[i] = at[i-1] + ranges[i-1].Length
	}
	moved := *r
	moved.Containers, moved.Extents = slices.Clone(r.Containers), slices.Clone(r.Extents)
	old := slices.IndexFunc(r.Containers, func(c Container) bool { return c.Digest == from })
	if old < 0 {
		return nil, invalid("containers", "%s is none of them", from)
	}
	moved.Containers[old] = to
	for i := range moved.Extents {
		e := &moved.Extents[i]
		if e.Container != old {
			continue
		}
		k := sort.Search(len(ranges), func(k int) bool { return ranges[k].From+ranges[k].Length > e.From })
		if k == len(ranges) || e.From < ranges[k].From || e.From+e.used() > ranges[k].From+ranges[k].Length {
			return nil, invalid(fmt.Sprintf("extent %d", i), "bytes %d+%d are not kept", e.From, e.used())
		}
		e.From += at[k] - ranges[k].From
	}
	return &moved, moved.Validate()
}
