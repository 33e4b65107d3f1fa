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
	target, err := holding(ctx, target)
	if err != nil {
		return nil, fmt.Errorf("match: target: %w", err)
	}
	m := newMatcher(target, o)
	if len(candidates) > 0 {
		if err := m.beside(ctx, candidates[0]); err != nil {
			return nil, fmt.Errorf("match: %w", err)
		}
	}
	if _, err := scanAll(ctx, target, m.scan()); err != nil {
		return nil, fmt.Errorf("match: target: %w", err)
	}
	return m.match(ctx, candidates)
}

// Scanned is a target that was read once for all that is wanted to know of it:
// its digest, its sketch, and where Match has to compare.
type Scanned struct {
	Digest cas.Digest
	Sketch Sketch

	matcher *matcher // nil once it has matched
}

// Scan reads all of target, on all cores. What it returns holds up to 50 MB.
// Where much of it stands in a similar blob, as the options tell, the sketch has
// keys of that one which the target may not have.
func Scan(ctx context.Context, target Source, o Options) (*Scanned, error) {
	target, err := holding(ctx, target)
	if err != nil {
		return nil, fmt.Errorf("scan: %w", err)
	}
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
	_, digest, err := scan(ctx, target, opts)
	if err != nil {
		return nil, fmt.Errorf("scan: %w", err)
	}
	return &Scanned{Digest: digest, Sketch: sk.sketch(target.Size()), matcher: m}, nil
}

// Match is the function Match for the target that was scanned. It is called once.
func (s *Scanned) Match(ctx context.Context, candidates []Candidate) (*Plan, error) {
	m := s.matcher
	if m == nil {
		return nil, errors.New("match: the target was matched before")
	}
	s.matcher = nil
	return m.match(ctx, candidates)
}

func (m *matcher) match(ctx context.Context, candidates []Candidate) (*Plan, error) {
	defer letGo(m.target)
	defer m.table.release()
	candidates = m.withGuide(candidates)
	if err := m.check(candidates); err != nil {
		return nil, err
	}
	if err := m.copies.done(); err != nil {
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
	copies     *ownCopies
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

// scan says how the target is scanned, and what becomes of its segments meanwhile.
func (m *matcher) scan() scanOptions {
	searched := m.target.Size()
	if m.guide != nil {
		searched = m.guide.left(searched)
	}
	// As many as random bytes have.
	m.table = newTable(searched/anchorEvery<<max(-m.level, 0)>>max(m.level, 0), m.target.Size())
	m.copies = &ownCopies{matcher: m, spare: spareWork + workPerByte*m.target.Size()}
	return scanOptions{level: m.level, least: int(m.floor), guide: m.guide, each: m.copies.next}
}
