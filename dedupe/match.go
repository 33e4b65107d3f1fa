package dedupe

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
)

// defaultFloor is the least length of a match: an extent takes some ten bytes
// of a recipe and a read of its own when the blob is rebuilt. Where anchors are
// dense, matches that are shorter by as much are found as well as others.
const defaultFloor = 1 << 10

// leastFloor: shorter runs than that hardly ever pay.
const leastFloor = windowSize

// leastPiece is what may be left of a match where another has the rest.
const leastPiece = 64

// Options of Match. The zero value is ready to use.
type Options struct {
	Floor int64 // shortest match in bytes; 0: 64 for blobs of up to 16 MiB, 1 KiB at 128 MiB, and twice as much with each doubling

	// Digest is that of the target where the caller knows it, as of a stored blob
	// with a valid stamp: Scan does not hash it then, and says the same.
	Digest cas.Digest

	// Similar, which may be nil, is asked by Scan with the sketch of a few parts of
	// a large target for stored blobs that are probably much the same, the best one
	// first. What the first has at about the same places is compared at once, so its
	// source has to be open until Match is done, which takes from it whether it is
	// among its candidates or not.
	Similar func(ctx context.Context, parts Sketch) ([]Similar, error)

	guideFrom int64 // tests: guidedLeast
}

// Similar is a candidate that a target is probably much the same as.
type Similar struct {
	Candidate
	Sketch Sketch
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
	m := newMatcher(target, o)
	if len(candidates) > 0 {
		if err := m.beside(ctx, candidates[0]); err != nil {
			return nil, fmt.Errorf("match: %w", err)
		}
	}
	all, err := scanAll(ctx, target, m.scan())
	if err != nil {
		return nil, fmt.Errorf("match: target: %w", err)
	}
	return m.match(ctx, all, candidates)
}

// Scanned is a target that was read once for all that is wanted to know of it:
// its digest, its sketch, and where Match has to compare.
type Scanned struct {
	Digest cas.Digest
	Sketch Sketch

	matcher *matcher
	all     []segment
}

// Scan reads all of target, on all cores. What it returns holds up to 50 MB.
// Where much of it stands in a similar blob, as the options tell, the sketch has
// keys of that one which the target may not have.
func Scan(ctx context.Context, target Source, o Options) (*Scanned, error) {
	m := newMatcher(target, o)
	sk := newSketcher()
	if err := m.similar(ctx, o.Similar, sk); err != nil {
		return nil, fmt.Errorf("scan: %w", err)
	}
	opts := m.scan()
	opts.sketch = sk
	scan := scanAndSum
	if !o.Digest.IsZero() {
		scan = func(ctx context.Context, src Source, opts scanOptions) ([]segment, cas.Digest, error) {
			all, err := scanAll(ctx, src, opts)
			return all, o.Digest, err
		}
	}
	all, digest, err := scan(ctx, target, opts)
	if err != nil {
		return nil, fmt.Errorf("scan: %w", err)
	}
	return &Scanned{Digest: digest, Sketch: sk.sketch(target.Size()), matcher: m, all: all}, nil
}

// Match is the function Match for the target that was scanned. It is called once.
func (s *Scanned) Match(ctx context.Context, candidates []Candidate) (*Plan, error) {
	all := s.all
	if s.matcher.table != nil {
		return nil, errors.New("match: the target was matched before")
	}
	s.all = nil
	return s.matcher.match(ctx, all, candidates)
}

func (m *matcher) match(ctx context.Context, all []segment, candidates []Candidate) (*Plan, error) {
	candidates = m.withGuide(candidates)
	if err := m.check(candidates); err != nil {
		return nil, err
	}
	if err := m.index(ctx, all); err != nil {
		return nil, fmt.Errorf("match: target: %w", err)
	}
	if err := m.widen(); err != nil {
		return nil, fmt.Errorf("match: %w", &ContainerError{m.guide.Digest, err})
	}
	for i, c := range candidates {
		if err := m.candidate(ctx, i, c); err != nil {
			return nil, fmt.Errorf("match: %w", &ContainerError{c.Digest, err})
		}
	}
	if err := m.fill(ctx); err != nil {
		return nil, err
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
	guideFrom  int64 // bytes of the least target that gets one
	guide      *guide
	guideIndex int      // of its candidate
	marks      []anchor // of what the guide covers
	stats      Stats
}

func newMatcher(target Source, o Options) *matcher {
	size := target.Size()
	m := &matcher{target: target, floor: o.Floor, level: levelOf(size), guideFrom: cmp.Or(o.guideFrom, guidedLeast)}
	if m.floor <= 0 {
		m.floor = max(int64(defaultFloor)>>max(-m.level, 0), leastFloor)
	}
	m.floor = max(m.floor, windowSize, size>>17)
	return m
}

// levelOf returns at which level a target of that size is scanned.
func levelOf(size int64) int {
	level := denseLevel
	for level < 0 && size/anchorEvery<<-level > denseAnchors {
		level++
	}
	for size/anchorEvery>>max(level, 0) > usualAnchors {
		level++
	}
	return level
}

func (m *matcher) scan() scanOptions {
	return scanOptions{level: m.level, least: int(m.floor), guide: m.guide}
}

// index fills the table with the target's anchors, and finds what the target
// has twice: of that only the first is in the table.
func (m *matcher) index(ctx context.Context, all []segment) error {
	count, marks := 0, 0
	for _, s := range all {
		count += len(s.anchors)
		marks += len(s.marks)
	}
	m.marks = make([]anchor, 0, marks)
	m.table = newTable(count, m.target.Size())
	o := &ownCopies{matcher: m, spare: spareWork + workPerByte*m.target.Size()}
	defer func() { m.stats.Compared += o.compared }()
	for i, s := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		for k := range s.covered {
			s.covered[k].source = m.guideIndex
			m.covered = m.covered.push(s.covered[k])
		}
		if err := o.segment(s); err != nil {
			return err
		}
		m.marks = append(m.marks, s.marks...)
		all[i] = segment{} // the table has them
	}
	m.stats.Scanned += m.target.Size() - m.covered.bytes()
	if err := o.quietUntil(m.target.Size()); err != nil {
		return err
	}
	o.still()
	return nil
}

// ownCopies goes through the target's segments in order.
type ownCopies struct {
	*matcher
	comparer
	spare  int64 // bytes that may still be compared in vain
	end    int64 // of the latest range that is a copy
	heard  int64 // the latest anchor
	quiet  quietRanges
	places []int64
	warm   uint64 // nothing; see table.touch
}

// touchAhead is for how many anchors the table's slots are fetched at once.
const touchAhead = 128

func (o *ownCopies) segment(s segment) error {
	for i, a := range s.anchors {
		if i%touchAhead == 0 {
			o.warm |= o.table.touch(s.anchors[i:min(i+touchAhead, len(s.anchors))])
		}
		for len(s.runs) > 0 && s.runs[0].at <= a.at {
			if err := o.run(s.runs[0]); err != nil {
				return err
			}
			s.runs = s.runs[1:]
		}
		for len(s.covered) > 0 && s.covered[0].at <= a.at {
			if err := o.pass(s.covered[0]); err != nil {
				return err
			}
			s.covered = s.covered[1:]
		}
		if err := o.quietUntil(a.at); err != nil {
			return err
		}
		if a.at < o.end {
			continue
		}
		found, err := o.anchor(a)
		if err != nil {
			return err
		}
		if !found {
			o.table.insert(a)
		}
	}
	for _, r := range s.runs {
		if err := o.run(r); err != nil {
			return err
		}
	}
	for _, m := range s.covered {
		if err := o.pass(m); err != nil {
			return err
		}
	}
	return nil
}

// pass leaves out what the guide has found: nothing is known of its anchors.
func (o *ownCopies) pass(m match) error {
	if err := o.quietUntil(m.at); err != nil {
		return err
	}
	o.heard, o.end = max(o.heard, m.end()), max(o.end, m.end())
	return nil
}

// run takes what repeats the first period of a run, which may go on in further segments.
func (o *ownCopies) run(r run) error {
	at := max(r.at+r.period, o.end)
	if at >= r.end() || o.spare <= 0 {
		return nil
	}
	before := o.compared
	found, err := o.copyOf(&o.comparer, at, at-r.period, o.end)
	if err != nil {
		return err
	}
	if found.length < o.floor {
		o.spare -= o.compared - before
		return nil
	}
	// A long run is no quiet range, but ends one; short ones are parts of it.
	if found.length >= longRun {
		if err := o.quietUntil(found.at); err != nil {
			return err
		}
		o.heard = found.end()
	}
	o.take(found)
	return nil
}

// anchor looks whether what stands around an anchor of the target stands earlier in it.
func (o *ownCopies) anchor(a anchor) (bool, error) {
	best := match{}
	o.places = o.table.lookup(a.key, o.places[:0])
	for _, from := range o.places {
		if o.spare <= 0 {
			break
		}
		before := o.compared
		found, err := o.copyOf(&o.comparer, a.at, from, o.end)
		if err != nil {
			return false, err
		}
		if found.length < o.floor {
			o.spare -= o.compared - before
		} else if found.length > best.length {
			best = found
		}
	}
	if best.length == 0 {
		return false, nil
	}
	o.take(best)
	return true, nil
}

func (o *ownCopies) take(found match) {
	o.own = o.own.push(found)
	o.end = found.end()
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
