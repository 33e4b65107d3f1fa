package match

import (
	"cmp"
	"slices"
	"sort"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Plan says how a blob can be restored: from ranges of bases, and from literals, its ranges that no
// base has.
type Plan struct {
	Size int64
	// Bases has the candidates that are needed, then the literals if there are any.
	Bases   []dedupe.Base
	Extents []dedupe.Extent // as in a Recipe
	Sketch  Sketch          // of the blob

	stats stats
	// literals has the ranges of the literals: At is the offset in the literals, From that in the
	// target.
	literals []dedupe.Extent
}

// LiteralSize returns the number of bytes that no base has.
func (p *Plan) LiteralSize() int64 {
	if len(p.literals) == 0 {
		return 0
	}
	last := p.literals[len(p.literals)-1]
	return last.At + last.Length
}

// Shares reports whether any bytes are shared. A plan with only literals cannot become a recipe,
// because its base would be the blob.
func (p *Plan) Shares() bool { return p.LiteralSize() < p.Size }

// Literals returns the literals as one source. They must be stored as a blob before the recipe.
func (p *Plan) Literals(target dedupe.Source) dedupe.Source {
	return &literalSource{p.literals, target, p.LiteralSize()}
}

type literalSource struct {
	ranges []dedupe.Extent
	target dedupe.Source
	size   int64
}

func (l *literalSource) Size() int64 { return l.size }

// ReadAt is io.ReaderAt.
func (l *literalSource) ReadAt(p []byte, off int64) (int, error) {
	return dedupe.ReadExtents(l.ranges, p, off, func(p []byte, e dedupe.Extent, skip int64) error {
		return dedupe.ReadFull(l.target, p, e.From+skip)
	})
}

// Recipe returns the plan as a recipe of the blob, with the digest of the literals, which is
// ignored if LiteralSize is 0. It fails with a *FormatError if the plan shares no bytes.
func (p *Plan) Recipe(blob, literals cas.Digest) (*dedupe.Recipe, error) {
	r := &dedupe.Recipe{Blob: blob, Size: p.Size, Bases: slices.Clone(p.Bases),
		Literals: dedupe.NoLiterals, Extents: slices.Clone(p.Extents)}
	if p.LiteralSize() > 0 {
		last := len(r.Bases) - 1
		r.Bases[last].Digest = literals
		r.Literals = last
		// Equal literals may exist, and be a base already.
		for i, c := range r.Bases[:last] {
			if c.Digest == literals {
				r.Bases, r.Literals = r.Bases[:last], i
				for k := range r.Extents {
					if r.Extents[k].Base == last {
						r.Extents[k].Base = i
					}
				}
				break
			}
		}
	}
	return r, r.Validate()
}

// plan makes the plan from the matches. It drops copies and short matches if there are too many
// extents.
func (m *matcher) plan() *Plan {
	for least := m.floor; ; least *= 2 {
		b := &builder{literal: len(m.candidates)}
		b.build(m.covered, m.selfCopies, m.target.Size())
		if len(b.out) <= dedupe.MaxExtents {
			return m.named(b)
		}
		m.selfCopies = nil
		m.covered = slices.DeleteFunc(m.covered, func(c match) bool { return c.length < least })
	}
}

func (m *matcher) named(b *builder) *Plan {
	p := &Plan{Size: m.target.Size(), Extents: b.out, stats: m.stats, literals: b.literals}
	place := make([]int, len(m.candidates)+1)
	for _, e := range b.out {
		place[e.Base] = -1
	}
	for i, c := range m.candidates {
		if place[i] < 0 {
			place[i] = len(p.Bases)
			p.Bases = append(p.Bases,
				dedupe.Base{Digest: c.Digest, Size: c.Source.Size()})
		}
	}
	if n := p.LiteralSize(); n > 0 {
		place[len(m.candidates)] = len(p.Bases)
		p.Bases = append(p.Bases, dedupe.Base{Size: n})
	}
	for i := range p.Extents {
		p.Extents[i].Base = place[p.Extents[i].Base]
	}
	return p
}

// shortPeriod is the longest period for which a repeated run becomes one extent. Longer ones become
// copies.
const shortPeriod = 4096

// builder makes extents from the target's beginning to its end. A copy of earlier bytes of the
// target gets the extents of these bytes, so that a recipe never refers to its own blob.
type builder struct {
	out      []dedupe.Extent
	literals []dedupe.Extent // as in Plan
	size     int64           // bytes of literals so far
	literal  int             // index of their base
	at       int64           // end of the extents so far
}

func (b *builder) build(found, own cover, size int64) {
	for _, m := range found {
		b.gap(m.at, own)
		b.push(dedupe.Extent{Length: m.length, From: m.from, Base: m.source})
	}
	b.gap(size, own)
}

// sourcesOfCopies returns matches of candidates for sources of self-copies that would otherwise be
// literals. They are missing because a candidate is compared with only one of two equal ranges of
// the target, which may be the later one.
func (m *matcher) sourcesOfCopies() (found []match) {
	for _, own := range m.selfCopies {
		if m.selfCopies.has(own.from) {
			continue // no literals
		}
		i := sort.Search(len(m.covered), func(i int) bool { return m.covered[i].end() > own.at })
		for ; i < len(m.covered) && m.covered[i].at < own.end(); i++ {
			c := m.covered[i]
			c = c.cut(max(c.at, own.at), min(c.end(), own.end()))
			c.at += own.from - own.at
			found = append(found, c)
		}
	}
	return found
}

func (b *builder) gap(end int64, own cover) {
	i := sort.Search(len(own), func(i int) bool { return own[i].end() > b.at })
	for ; i < len(own) && own[i].at < end; i++ {
		at, stop := max(own[i].at, b.at), min(own[i].end(), end)
		if stop-at < minPiece {
			continue
		}
		b.literalTo(at)
		b.copy(own[i].cut(at, stop))
	}
	b.literalTo(end)
}

func (b *builder) literalTo(end int64) {
	if n := end - b.at; n > 0 {
		from := b.addLiteral(b.at, n)
		b.push(dedupe.Extent{Length: n, From: from, Base: b.literal})
	}
}

func (b *builder) addLiteral(at, n int64) int64 {
	from := b.size
	b.size += n
	if k := len(b.literals); k > 0 && b.literals[k-1].From+b.literals[k-1].Length == at {
		b.literals[k-1].Length += n
	} else {
		b.literals = append(b.literals, dedupe.Extent{At: from, From: at, Length: n})
	}
	return from
}

func (b *builder) copy(m match) {
	if distance := m.at - m.from; distance < m.length && distance < shortPeriod {
		// The previous extent is usually the run's first period.
		if k := len(b.out) - 1; k >= 0 && b.out[k].Period == 0 && b.out[k].Length >= distance {
			last := b.out[k]
			b.push(dedupe.Extent{Length: m.length, From: last.From + last.Length - distance,
				Period: distance, Base: last.Base})
			return
		}
		b.push(dedupe.Extent{Length: m.length, From: b.addLiteral(m.at, distance), Period: distance,
			Base: b.literal})
		return
	}
	// Stop beyond MaxExtents, because the plan is dropped then anyway.
	for done := int64(0); done < m.length && len(b.out) <= dedupe.MaxExtents; {
		done += b.repeat(m.from+done, m.length-done)
	}
}

// repeat appends one extent with at most n bytes that equal those at from, and returns their
// number.
func (b *builder) repeat(from, n int64) int64 {
	e := b.out[sort.Search(len(b.out),
		func(i int) bool { return b.out[i].At+b.out[i].Length > from })]
	skip := from - e.At
	n = min(n, e.Length-skip)
	if e.Period > 0 {
		phase := skip % e.Period
		if phase == 0 && n > e.Period {
			b.push(dedupe.Extent{Length: n, From: e.From, Period: e.Period, Base: e.Base})
			return n
		}
		skip, n = phase, min(n, e.Period-phase)
	}
	b.push(dedupe.Extent{Length: n, From: e.From + skip, Base: e.Base})
	return n
}

func (b *builder) push(e dedupe.Extent) {
	e.At = b.at
	b.at += e.Length
	if k := len(b.out) - 1; k >= 0 && e.Period == 0 && b.out[k].Period == 0 &&
		b.out[k].Base == e.Base && b.out[k].From+b.out[k].Length == e.From {
		b.out[k].Length += e.Length
		return
	}
	b.out = append(b.out, e)
}

// match is a range of the target that equals the bytes at from in a source, or earlier in the
// target.
type match struct {
	at, from, length int64
	source           int // index of the candidate
}

func (m match) end() int64 { return m.at + m.length }

func (m match) continues(before match) bool {
	return m.source == before.source && m.at == before.end() && m.from == before.from+before.length
}

// cover has the matches found so far, sorted and not overlapping.
type cover []match

func (c cover) has(off int64) bool {
	i := sort.Search(len(c), func(i int) bool { return c[i].end() > off })
	return i < len(c) && c[i].at <= off
}

func (c cover) bytes() (n int64) {
	for _, m := range c {
		n += m.length
	}
	return n
}

// add returns the cover with further matches, which are cut where the cover or a longer one has the
// bytes.
func (c cover) add(more []match, least int64) cover {
	slices.SortFunc(more, func(a, b match) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(b.length, a.length))
	})
	out := make(cover, 0, len(c)+len(more))
	end := int64(0) // end of the result so far
	k := 0          // the first of c that ends after the position
	for _, m := range more {
		at := max(m.at, end)
		for at < m.end() {
			for k < len(c) && c[k].end() <= at {
				out = out.push(c[k])
				k++
			}
			stop := m.end()
			if k < len(c) {
				if c[k].at <= at {
					at = c[k].end()
					end = max(end, at)
					continue
				}
				stop = min(stop, c[k].at)
			}
			if stop-at >= least || out.continuedBy(m.cut(at, stop)) {
				out = out.push(m.cut(at, stop))
			}
			at = stop
			end = max(end, at)
		}
	}
	for ; k < len(c); k++ {
		out = out.push(c[k])
	}
	return out
}

func (m match) cut(at, end int64) match {
	return match{at: at, from: m.from + at - m.at, length: end - at, source: m.source}
}

func (c cover) continuedBy(m match) bool { return len(c) > 0 && m.continues(c[len(c)-1]) }

func (c cover) push(m match) cover {
	if c.continuedBy(m) {
		c[len(c)-1].length += m.length
		return c
	}
	return append(c, m)
}
