package match

import (
	"slices"
	"sort"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Plan says how a blob can be put together: from ranges of bases, and from
// literals, ranges of its own that are nowhere else.
type Plan struct {
	Size int64
	// those of the candidates that are needed, then the literals if there are any
	Bases   []dedupe.Base
	Extents []dedupe.Extent // as in a Recipe
	Sketch  Sketch          // of the blob

	stats stats
	// where each range of the literals is in the target: At in the literals, From in the target
	literals []dedupe.Extent
}

// LiteralSize returns how many bytes of the plan are nowhere else.
func (p *Plan) LiteralSize() int64 {
	if len(p.literals) == 0 {
		return 0
	}
	last := p.literals[len(p.literals)-1]
	return last.At + last.Length
}

// Shares reports whether some bytes need not be stored again.
// A plan that is all literals is no recipe: its base would be the blob.
func (p *Plan) Shares() bool { return p.LiteralSize() < p.Size }

// Literals returns those bytes, one range of the target after another: what is
// to be stored as a blob before the recipe is.
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

// Recipe returns the plan as a recipe of the blob, once the digest of the
// literals is known; it is not looked at where LiteralSize is 0. The error is a
// *FormatError, as that of a plan that shares nothing.
func (p *Plan) Recipe(blob, literals cas.Digest) (*dedupe.Recipe, error) {
	r := &dedupe.Recipe{Blob: blob, Size: p.Size, Bases: slices.Clone(p.Bases),
		Literals: dedupe.NoLiterals, Extents: slices.Clone(p.Extents)}
	if p.LiteralSize() > 0 {
		last := len(r.Bases) - 1
		r.Bases[last].Digest = literals
		r.Literals = last
		// The same literals may have been stored before, and be a base already.
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

// Framed returns the plan as a recipe that has the blob's own literals in its own
// file, compressed: RecipeStore.Put writes them there. The plan has literals.
func (p *Plan) Framed(blob cas.Digest) *dedupe.Recipe {
	last := len(p.Bases) - 1 // the literals, which the frames take the place of
	return &dedupe.Recipe{
		Blob: blob, Size: p.Size, Bases: slices.Clone(p.Bases[:last]), Literals: dedupe.NoLiterals,
		Extents: slices.Clone(p.Extents),
		Frames:  &dedupe.Frames{Size: p.LiteralSize(), Each: dedupe.FrameSize},
	}
}

// plan lays out what was found, dropping copies and short matches where extents are too many.
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

// shortPeriod: up to it a repeated run stores one period; longer copies are laid piece by piece.
const shortPeriod = 4096

// builder lays extents from the target's beginning to its end. Copies of earlier bytes of the
// target become what that was laid as, so that a recipe never refers to its own blob.
type builder struct {
	out      []dedupe.Extent
	literals []dedupe.Extent // as in Plan
	size     int64           // of the literals
	literal  int             // their base
	at       int64           // what is laid so far
}

func (b *builder) build(found, own cover, size int64) {
	for _, m := range found {
		b.gap(m.at, own)
		b.push(dedupe.Extent{Length: m.length, From: m.from, Base: m.source})
	}
	b.gap(size, own)
}

// sourcesOfCopies returns what the candidates have of those sources of self-copies that would be
// literals: a candidate is compared with one of two equal ranges of the target only, which may be
// the later one.
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
		// The extent before is mostly the run's first period.
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
	// More than a recipe may have is not kept in any case.
	for done := int64(0); done < m.length && len(b.out) <= dedupe.MaxExtents; {
		done += b.repeat(m.from+done, m.length-done)
	}
}

// repeat lays at most n bytes of what the target has at from, one extent, and returns how many.
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

// match is a range of the target that is also at from in a source, or earlier in itself.
type match struct {
	at, from, length int64
	source           int // index of the candidate
}

func (m match) end() int64 { return m.at + m.length }

func (m match) continues(before match) bool {
	return m.source == before.source && m.at == before.end() && m.from == before.from+before.length
}

// cover is what of the target is found: matches in order that do not overlap.
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

// add returns the cover with further matches, cut where it or an earlier longer one has bytes.
func (c cover) add(more []match, least int64) cover {
	sort.Slice(more, func(i, j int) bool {
		a, b := more[i], more[j]
		if a.at != b.at {
			return a.at < b.at
		}
		return a.length > b.length
	})
	out := make(cover, 0, len(c)+len(more))
	end := int64(0) // of what is laid, or was there
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
