package dedupe

import (
	"cmp"
	"slices"
	"sort"

	"github.com/epcached/epcached/cas"
)

// maxRepeats bounds how many extents one repeated range becomes where the bytes
// that it repeats stand in several places.
const maxRepeats = 1 << 12

// Through returns the recipe without one of its containers: what it took from
// that, it takes from where made, the recipe of that very container, has the
// bytes from. So the container can be packed itself, and recipes still have depth
// one. The error is a *FormatError: made is of no container of the recipe, or it
// would not keep the limits.
func (r *Recipe) Through(made *Recipe) (*Recipe, error) {
	old := slices.IndexFunc(r.Containers, func(c Container) bool { return c.Digest == made.Blob })
	if old < 0 {
		return nil, invalid("containers", "%s is none of them", made.Blob)
	}
	if size := r.Containers[old].Size; size != made.Size {
		return nil, invalid("containers", "%s has %d bytes, its own recipe says %d", made.Blob, size, made.Size)
	}
	if made.Frames != nil {
		return nil, invalid("frames", "%s keeps its own literals for itself", made.Blob)
	}
	c := composer{place: make(map[cas.Digest]int)}
	for _, e := range r.Extents {
		var err error
		switch {
		case e.Container == len(r.Containers):
			c.lay(framesPlace, e)
		case e.Container != old:
			c.add(r.Containers[e.Container], e)
		case e.Period == 0:
			made.each(e.From, e.Length, func(piece Extent) { c.add(made.Containers[piece.Container], piece) })
		default:
			err = c.repeat(made, e)
		}
		if err != nil {
			return nil, err
		}
	}
	for i := range c.out {
		if c.out[i].Container == framesPlace {
			c.out[i].Container = len(c.containers)
		}
	}
	out := &Recipe{Blob: r.Blob, Size: r.Size, Containers: c.containers, Literals: NoLiterals, Extents: c.out, Tensors: r.Tensors, Frames: r.Frames}
	if r.Literals != NoLiterals {
		if at, ok := c.place[r.Containers[r.Literals].Digest]; ok {
			out.Literals = at
		}
	}
	return out, out.Validate()
}

// LiteralsIn returns the recipe of the blob's own literals, which all stand in the
// blob: with Through, whoever took from them takes from the blob. It is nil where
// the recipe has none, and the error a *FormatError where they have more than the
// blob.
func (r *Recipe) LiteralsIn() (*Recipe, error) {
	if r.Literals == NoLiterals {
		return nil, nil
	}
	own := r.Containers[r.Literals]
	out := &Recipe{Blob: own.Digest, Size: own.Size, Containers: []Container{{r.Blob, r.Size}}, Literals: NoLiterals}
	var from []Extent
	for _, e := range r.Extents {
		if e.Container == r.Literals {
			from = append(from, e)
		}
	}
	slices.SortFunc(from, func(a, b Extent) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(b.used(), a.used())) })
	at := int64(0)
	for _, e := range from {
		skip := at - e.From // what an earlier one has already
		if n := e.used() - skip; skip >= 0 && n > 0 {
			out.Extents = append(out.Extents, Extent{At: at, Length: n, From: e.At + skip})
			at += n
		}
	}
	return out, out.Validate()
}

// each calls fn with where a range of the blob comes from, piece by piece; At is
// not set.
func (r *Recipe) each(from, length int64, fn func(Extent)) {
	i := sort.Search(len(r.Extents), func(i int) bool { return r.Extents[i].At+r.Extents[i].Length > from })
	for ; length > 0 && i < len(r.Extents); i++ {
		e := r.Extents[i]
		skip := from - e.At
		n := min(length, e.Length-skip)
		from, length = from+n, length-n
		if e.Period == 0 {
			fn(Extent{Length: n, From: e.From + skip, Container: e.Container})
			continue
		}
		if skip %= e.Period; skip > 0 { // up to where it begins again
			k := min(n, e.Period-skip)
			fn(Extent{Length: k, From: e.From + skip, Container: e.Container})
			n -= k
		}
		if n > e.Period {
			fn(Extent{Length: n, From: e.From, Period: e.Period, Container: e.Container})
		} else if n > 0 {
			fn(Extent{Length: n, From: e.From, Container: e.Container})
		}
	}
}

// framesPlace stands for the recipe's frames until all containers are known.
const framesPlace = -1

// composer lays extents one behind the other.
type composer struct {
	out        []Extent
	containers []Container
	place      map[cas.Digest]int // of each container
	at         int64
}

// add puts an extent at the end, as a part of the last one where it goes on there.
func (c *composer) add(from Container, e Extent) {
	at, ok := c.place[from.Digest]
	if !ok {
		at = len(c.containers)
		c.place[from.Digest], c.containers = at, append(c.containers, from)
	}
	c.lay(at, e)
}

func (c *composer) lay(at int, e Extent) {
	e.At, e.Container = c.at, at
	c.at += e.Length
	if n := len(c.out); n > 0 && e.Period == 0 {
		if last := &c.out[n-1]; last.Period == 0 && last.Container == at && last.From+last.Length == e.From {
			last.Length += e.Length
			return
		}
	}
	c.out = append(c.out, e)
}

// repeat puts what a repeated range of the blob of made becomes.
func (c *composer) repeat(made *Recipe, e Extent) error {
	var pieces []Extent
	made.each(e.From, e.Period, func(piece Extent) { pieces = append(pieces, piece) })
	if len(pieces) == 1 && pieces[0].Period == 0 {
		piece := pieces[0]
		piece.Length, piece.Period = e.Length, e.Period
		c.add(made.Containers[piece.Container], piece)
		return nil
	}
	if e.Length/e.Period*int64(len(pieces)) > maxRepeats {
		return invalid("extents", "%d bytes, repeated for %d, stand in %d places", e.Period, e.Length, len(pieces))
	}
	for left := e.Length; left > 0; {
		made.each(e.From, min(left, e.Period), func(piece Extent) { c.add(made.Containers[piece.Container], piece) })
		left -= min(left, e.Period)
	}
	return nil
}
