package dedupe

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/cas"
)

// defaultFloor is the least length of a match: an extent takes some ten bytes
// of a recipe and a read of its own when the blob is rebuilt.
const defaultFloor = 1 << 10

// leastPiece is what may be left of a match where another has the rest.
const leastPiece = 64

// Options of Match. The zero value is ready to use.
type Options struct {
	Floor int64 // shortest match in bytes; 0: 1 KiB. Raised for blobs of more than 128 MiB
}

// Stats says what Match did; it is the same for the same input.
type Stats struct {
	Scanned  int64 // bytes looked at for anchors
	Compared int64 // bytes of the target that were compared with others
	Opened   int   // candidates that were looked at
}

// Match finds what target shares with the candidates, which it takes in their
// order, and with itself, and returns a plan that covers all of it. Candidates
// stand whole, none is the target, and no digest is there twice.
//
// Bytes are compared, whatever their hashes say. Work is linear in the sizes,
// whatever the bytes are: comparing in vain stops when a part of a candidate has
// had its share, and what is missed is stored as literals. Memory is less than
// 100 MB whatever the sizes. The same input gives the same plan.
func Match(ctx context.Context, target Source, candidates []Candidate, o Options) (*Plan, error) {
	m, err := newMatcher(target, candidates, o)
	if err != nil {
		return nil, err
	}
	if err := m.index(ctx); err != nil {
		return nil, fmt.Errorf("match: target: %w", err)
	}
	for i, c := range candidates {
		if err := m.candidate(ctx, i, c); err != nil {
			return nil, fmt.Errorf("match: %w", &ContainerError{c.Digest, err})
		}
	}
	return m.plan(), nil
}

type matcher struct {
	target     Source
	candidates []Candidate
	floor      int64
	level      int
	table      *table
	own        cover // of the target, by what stands earlier in it
	covered    cover // by the candidates
	stats      Stats
}

func newMatcher(target Source, candidates []Candidate, o Options) (*matcher, error) {
	size := target.Size()
	if size < 0 || size > maxSize {
		return nil, fmt.Errorf("match: a target of %d bytes", size)
	}
	if len(candidates) >= MaxContainers {
		return nil, fmt.Errorf("match: %d candidates, %d and more", len(candidates), MaxContainers)
	}
	seen := make(map[cas.Digest]bool, len(candidates))
	for _, c := range candidates {
		if seen[c.Digest] || c.Digest.IsZero() {
			return nil, fmt.Errorf("match: candidate %s: twice, or no digest", c.Digest)
		}
		seen[c.Digest] = true
	}
	m := &matcher{target: target, candidates: candidates, floor: o.Floor}
	if m.floor <= 0 {
		m.floor = defaultFloor
	}
	m.floor = max(m.floor, windowSize, size>>17)
	for size/anchorEvery>>m.level > maxAnchors/2 {
		m.level++
	}
	return m, nil
}

// index fills the table with the target's anchors, and finds what the target
// has twice: of that only the first is in the table.
func (m *matcher) index(ctx context.Context) error {
	all, err := scanAll(ctx, m.target, m.level, nil)
	if err != nil {
		return err
	}
	m.stats.Scanned += m.target.Size()
	count := 0
	for _, list := range all {
		count += len(list)
	}
	m.table = newTable(count)
	var c comparer
	defer func() { m.stats.Compared += c.compared }()
	spare := spareWork + workPerByte*m.target.Size()
	end := int64(0) // of the latest range that is a copy
	var places []int64
	for i, list := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		for _, a := range list {
			if a.at < end {
				continue
			}
			best := match{}
			places = m.table.lookup(a.key, places[:0])
			for _, from := range places {
				if spare <= 0 {
					break
				}
				before := c.compared
				found, err := m.copyOf(&c, a.at, from, end)
				if err != nil {
					return err
				}
				if found.length < m.floor {
					spare -= c.compared - before
				} else if found.length > best.length {
					best = found
				}
			}
			if best.length > 0 {
				m.own = m.own.push(best)
				end = best.end()
				continue
			}
			m.table.insert(a)
		}
		all[i] = nil // the table has them
	}
	return nil
}

// copyOf extends what is the same at two positions of the target. It may
// overlap itself: then it is periodic.
func (m *matcher) copyOf(c *comparer, at, from, end int64) (match, error) {
	ahead, err := c.forward(m.target, from, m.target, at, m.target.Size()-at)
	if err != nil {
		return match{}, err
	}
	back, err := c.backward(m.target, from, m.target, at, min(from, at-end))
	return match{at: at - back, from: from - back, length: ahead + back}, err
}

// worthReading: a candidate is left out where what is still missing is less
// than this part of it. Small ones, which literals mostly are, always pass.
const worthReading = 4096

func (m *matcher) candidate(ctx context.Context, i int, c Candidate) error {
	if missing := m.target.Size() - m.covered.bytes(); missing < m.floor || missing < c.Source.Size()/worthReading {
		return nil
	}
	s := &stream{
		target: m.target, candidate: c.Source, index: i, table: m.table, covered: m.covered,
		mask: 1<<m.level - 1, floor: m.floor,
	}
	found, err := s.all(ctx, &m.stats)
	if err != nil {
		return err
	}
	m.stats.Opened++
	m.covered = m.covered.add(found, leastPiece)
	return nil
}
