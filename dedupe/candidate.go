package dedupe

import (
	"context"
	"fmt"
	"slices"

	"github.com/epcached/epcached/cas"
)

// worthReading: a candidate is left out where what is still missing is less
// than this part of it. Small ones, which literals mostly are, always pass.
const worthReading = 4096

// candidate finds what the i-th one has of what is missing.
func (m *matcher) candidate(ctx context.Context, i int, c Candidate) error {
	if missing := m.target.Size() - m.covered.bytes(); missing < m.floor || missing < c.Source.Size()/worthReading {
		return nil
	}
	s := &stream{
		target: m.target, candidate: c.Source, index: i, table: m.table, covered: m.covered,
		mask: 1<<max(m.level, 0) - 1, least: leastProduct(m.level), floor: m.floor,
	}
	var again []match
	if m.guide != nil && i == m.guideIndex {
		s.taken = takenOf(m.covered, i)
		var err error
		if again, err = s.again(ctx, m.marks, &m.stats); err != nil {
			return err
		}
	}
	found, err := s.all(ctx, &m.stats)
	if err != nil {
		return err
	}
	m.stats.Opened++
	m.covered = m.covered.add(append(found, again...), leastPiece)
	return nil
}

// beside has the target compared with what it is probably much the same as.
func (m *matcher) beside(ctx context.Context, c Candidate) error {
	if m.target.Size() < m.guideFrom || c.Source.Size() < m.guideFrom/2 {
		return nil
	}
	g, err := newGuide(ctx, m.target, c, m.floor)
	if g == nil || err != nil {
		return err
	}
	m.guide, m.level = g, g.level(m.target.Size())
	return nil
}

// similar asks for such a candidate, and adds its keys.
func (m *matcher) similar(ctx context.Context, ask func(context.Context, Sketch) ([]Similar, error), sk *sketcher) error {
	if ask == nil || m.target.Size() < m.guideFrom {
		return nil
	}
	parts, err := sketchOfParts(ctx, m.target)
	if err != nil {
		return err
	}
	all, err := ask(ctx, parts)
	if err != nil || len(all) == 0 {
		return err
	}
	if err := m.beside(ctx, all[0].Candidate); m.guide == nil || err != nil {
		return err
	}
	for _, k := range all[0].Sketch.Keys {
		sk.add(k)
	}
	return nil
}

// withGuide returns the candidates with that of the guide.
func (m *matcher) withGuide(candidates []Candidate) []Candidate {
	if m.guide == nil {
		return candidates
	}
	m.guideIndex = slices.IndexFunc(candidates, func(c Candidate) bool { return c.Digest == m.guide.Digest })
	if m.guideIndex < 0 {
		m.guideIndex = len(candidates)
		candidates = append(slices.Clone(candidates), m.guide.Candidate)
	}
	for i := range m.covered {
		m.covered[i].source = m.guideIndex
	}
	m.stats.Compared += m.guide.compared.Load()
	return candidates
}

// widen has what the guide has found go on as far as the bytes are equal, which
// segments and short runs may have cut. So nothing of it is compared once more
// from what is left beside it.
func (m *matcher) widen() error {
	if m.guide == nil {
		return nil
	}
	var c comparer
	defer func() { m.stats.Compared += c.compared }()
	for i := range m.covered {
		one := &m.covered[i]
		begin, end := int64(0), m.target.Size()
		if i > 0 {
			begin = m.covered[i-1].end()
		}
		if i+1 < len(m.covered) {
			end = m.covered[i+1].at
		}
		back, err := c.backward(m.target, one.at, m.guide.Source, one.from, min(one.at-begin, one.from))
		if err != nil {
			return err
		}
		*one = match{at: one.at - back, from: one.from - back, length: one.length + back, source: one.source}
		ahead, err := c.forward(m.target, one.end(), m.guide.Source, one.from+one.length, min(end-one.end(), m.guide.Source.Size()-one.from-one.length))
		if err != nil {
			return err
		}
		one.length += ahead
	}
	return nil
}

// check refuses what the caller should not have asked for.
func (m *matcher) check(candidates []Candidate) error {
	if size := m.target.Size(); size < 0 || size > maxSize {
		return fmt.Errorf("match: a target of %d bytes", size)
	}
	if len(candidates) >= MaxContainers {
		return fmt.Errorf("match: %d candidates, %d and more", len(candidates), MaxContainers)
	}
	seen := make(map[cas.Digest]bool, len(candidates))
	for _, c := range candidates {
		if seen[c.Digest] || c.Digest.IsZero() {
			return fmt.Errorf("match: candidate %s: twice, or no digest", c.Digest)
		}
		seen[c.Digest] = true
	}
	m.candidates = candidates
	return nil
}
