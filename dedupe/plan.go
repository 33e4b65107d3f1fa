package dedupe

import (
	"slices"

	"github.com/epcached/epcached/cas"
)

// Plan says how a blob can be put together: from ranges of containers, and from
// literals, ranges of its own that stand nowhere else.
type Plan struct {
	Size       int64
	Containers []Container // those of the candidates that are needed, then the literals if there are any
	Extents    []Extent    // as in a Recipe
	Sketch     Sketch      // of the blob

	stats    stats
	literals []Extent // where each range of the literals stands in the target: At in the literals, From in the target
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
func (p *Plan) Literals(target Source) Source {
	return &literalSource{p.literals, target, p.LiteralSize()}
}

type literalSource struct {
	ranges []Extent
	target Source
	size   int64
}

func (l *literalSource) Size() int64 { return l.size }

// ReadAt is io.ReaderAt.
func (l *literalSource) ReadAt(p []byte, off int64) (int, error) {
	return readExtents(l.ranges, p, off, func(p []byte, e Extent, skip int64) error {
		return readFull(l.target, p, e.From+skip)
	})
}

// Recipe returns the plan as a recipe of the blob, once the digest of the
// literals is known; it is not looked at where LiteralSize is 0. The error is a
// *FormatError, as that of a plan that shares nothing.
func (p *Plan) Recipe(blob, literals cas.Digest) (*Recipe, error) {
	r := &Recipe{Blob: blob, Size: p.Size, Containers: slices.Clone(p.Containers), Literals: NoLiterals, Extents: slices.Clone(p.Extents)}
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

// plan lays out what was found. Where that makes more extents than a recipe may
// have, copies within the blob and then the shortest matches are dropped.
func (m *matcher) plan() *Plan {
	for least := m.floor; ; least *= 2 {
		b := &builder{literal: len(m.candidates)}
		b.lay(m.covered, m.own, m.target.Size())
		if len(b.out) <= MaxExtents {
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
			p.Containers = append(p.Containers, Container{c.Digest, c.Source.Size()})
		}
	}
	if n := p.LiteralSize(); n > 0 {
		place[len(m.candidates)] = len(p.Containers)
		p.Containers = append(p.Containers, Container{Size: n})
	}
	for i := range p.Extents {
		p.Extents[i].Container = place[p.Extents[i].Container]
	}
	return p
}
