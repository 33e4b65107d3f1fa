package match

import (
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Plan says how a blob can be put together: from ranges of containers, and from
// literals, ranges of its own that stand nowhere else.
type Plan struct {
	Size       int64
	Containers []dedupe.Container // those of the candidates that are needed, then the literals if there are any
	Extents    []dedupe.Extent    // as in a Recipe
	Sketch     Sketch             // of the blob

	stats    stats
	literals []dedupe.Extent // where each range of the literals stands in the target: At in the literals, From in the target
}

// LiteralSize returns how many bytes the plan needs that stand nowhere else.
func (p *Plan) LiteralSize() int64 {
	if len(p.literals) == 0 {
		return 0
	}
	last := p.literals[len(p.literals)-1]
	return last.At + last.Length
}

// Shares reports whether there is anything that need not be stored once more.
// A plan that is all literals is no recipe: its container would be the blob.
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
	r := &dedupe.Recipe{Blob: blob, Size: p.Size, Containers: slices.Clone(p.Containers), Literals: dedupe.NoLiterals, Extents: slices.Clone(p.Extents)}
	if p.LiteralSize() > 0 {
		last := len(r.Containers) - 1
		r.Containers[last].Digest = literals
		r.Literals = last
		// The same literals may have been stored before, and be a container already.
		for i, c := range r.Containers[:last] {
			if c.Digest == literals {
				r.Containers, r.Literals = r.Containers[:last], i
				for k := range r.Extents {
					if r.Extents[k].Container == last {
						r.Extents[k].Container = i
					}
				}
				break
			}
		}
	}
	return r, r.Validate()
}

// Framed returns the plan as a recipe that has the blob's own literals in its own
// file, compressed: Shelf.Put writes them there. The plan has literals.
func (p *Plan) Framed(blob cas.Digest) *dedupe.Recipe {
	last := len(p.Containers) - 1 // the literals, which the frames take the place of
	return &dedupe.Recipe{
		Blob: blob, Size: p.Size,
		Containers: slices.Clone(p.Containers[:last]), Literals: dedupe.NoLiterals,
		Extents: slices.Clone(p.Extents),
		Frames:  &dedupe.Frames{Size: p.LiteralSize(), Each: dedupe.FrameSize},
	}
}

// plan lays out what was found. Where that makes more extents than a recipe may
// have, copies within the blob and then the shortest matches are dropped.
func (m *matcher) plan() *Plan {
	for least := m.floor; ; least *= 2 {
		b := &builder{literal: len(m.candidates)}
		b.lay(m.covered, m.own, m.target.Size())
		if len(b.out) <= dedupe.MaxExtents {
			return m.named(b)
		}
		m.own = nil
		m.covered = slices.DeleteFunc(m.covered, func(c match) bool { return c.length < least })
	}
}

// named gives the candidates that are needed their place in the plan.
func (m *matcher) named(b *builder) *Plan {
	p := &Plan{Size: m.target.Size(), Extents: b.out, stats: m.stats, literals: b.literals}
	place := make([]int, len(m.candidates)+1)
	for _, e := range b.out {
		place[e.Container] = -1
	}
	for i, c := range m.candidates {
		if place[i] < 0 {
			place[i] = len(p.Containers)
			p.Containers = append(p.Containers, dedupe.Container{Digest: c.Digest, Size: c.Source.Size()})
		}
	}
	if n := p.LiteralSize(); n > 0 {
		place[len(m.candidates)] = len(p.Containers)
		p.Containers = append(p.Containers, dedupe.Container{Size: n})
	}
	for i := range p.Extents {
		p.Extents[i].Container = place[p.Extents[i].Container]
	}
	return p
}
