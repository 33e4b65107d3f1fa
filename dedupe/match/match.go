// Package match finds what context binaries share.
//
// A Sketch is a few hundred numbers that show which stored blobs are likely to share bytes with a
// new one; Candidates ranks them in memory that does not depend on how many there are. A sketch
// decides where to look and nothing else: no hash is trusted to say that bytes are equal.
//
// Find finds the extents of a recipe. It reads the target once and lists its anchors, positions
// that the bytes themselves choose, about one in a KiB; then it goes through each candidate, and
// where an anchor is in both, compares the bytes both ways as far as they are equal. Bytes that
// the target has twice count too. Runs without anchors, such as zeros, are shared where they are
// beside something that is.
//
// The caller ensures the scopes: a private blob may use bases of the shared scope or of the
// same user, never another user's.
//
// All functions may be called at the same time. Start with Find and Candidates.
package match

import (
	"bytes"
	"context"
	"fmt"
	"sync"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// defaultMinMatch is the least length of a match: an extent takes some ten bytes
// of a recipe and a read of its own when the blob is rebuilt. Where anchors are
// dense, matches that are shorter by as much are found as well as others.
const defaultMinMatch = 1 << 10

// minMinMatch: shorter runs than that hardly ever pay.
const minMinMatch = windowSize

const minPiece = 64 // what may be left of a match where another has the rest

// maxHeldMatches is up to how many bytes a target is held in memory while it is matched.
// Such ones have dense anchors, and short matches and gaps by the ten thousand: a
// read of each from the file takes longer than comparing it.
const maxHeldMatches = 16 << 20

// heldMatchBytes has the memory for that: the system gives new memory out page by page.
var heldMatchBytes = sync.Pool{New: func() any { return new([maxHeldMatches]byte) }}

// Candidate is a base that Find looks for shared bytes in.
type Candidate struct {
	Digest cas.Digest
	Source dedupe.Source
}

// Near returns the candidates for a target with that sketch.
type Near func(context.Context, Sketch) ([]Candidate, error)

// stats says what Find did; it is the same for the same input.
type stats struct {
	scanned  int64 // bytes looked at for anchors
	compared int64 // bytes of the target that were compared with others
}

// Find reads all of target, on all cores, calls near with its sketch, and finds what the target
// shares with the candidates that near returns, which it takes in their order, and with itself. The
// plan covers all of the target. Candidates are whole, none is the target, no digest is there
// twice, and there are fewer than MaxBases.
//
// Bytes are compared, whatever their hashes say. Work is linear in the sizes,
// whatever the bytes are: comparing in vain stops when a part of a candidate has
// had its share, and what is missed is stored as literals. Memory is less than
// 100 MB whatever the sizes. The same input gives the same plan.
func Find(ctx context.Context, target dedupe.Source, near Near) (*Plan, error) {
	if size := target.Size(); size < 0 || size > dedupe.MaxSize {
		return nil, fmt.Errorf("match: a target of %d bytes", size)
	}
	if size := target.Size(); size <= maxHeldMatches {
		held := heldMatchBytes.Get().(*[maxHeldMatches]byte)
		defer heldMatchBytes.Put(held)
		b := held[:size]
		if err := dedupe.ReadFull(target, b, 0); err != nil {
			return nil, fmt.Errorf("match: target: %w", err)
		}
		target = bytes.NewReader(b)
	}
	p, err := newMatcher(target).match(ctx, near)
	if err != nil {
		return nil, fmt.Errorf("match: %w", err)
	}
	return p, nil
}

type matcher struct {
	target     dedupe.Source
	candidates []Candidate
	floor      int64
	level      int
	table      *table
	selfCopies cover // of the target, by earlier bytes of it
	covered    cover // by the candidates
	stats      stats
}

func newMatcher(target dedupe.Source) *matcher {
	size := target.Size()
	m := &matcher{target: target, level: levelOf(size)}
	m.floor = max(int64(defaultMinMatch)>>max(-m.level, 0), minMinMatch, size>>17)
	return m
}

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

func (m *matcher) match(ctx context.Context, near Near) (*Plan, error) {
	size := m.target.Size()
	// As many as random bytes have.
	m.table = newTable(size/anchorEvery<<max(-m.level, 0)>>max(m.level, 0), size)
	defer m.table.release()
	copies := &selfCopies{matcher: m, spare: spareWork + workPerByte*size}
	sk := newSketcher()
	o := scanOptions{level: m.level, least: int(m.floor), sketch: sk, each: copies.segment}
	err := scanAll(ctx, m.target, o)
	if err == nil {
		err = copies.done()
	}
	if err != nil {
		return nil, fmt.Errorf("target: %w", err)
	}
	sketch := sk.sketch(size)
	if m.candidates, err = near(ctx, sketch); err != nil {
		return nil, err
	}
	for i, c := range m.candidates {
		if err := m.candidate(ctx, i); err != nil {
			return nil, &dedupe.BaseError{Digest: c.Digest, Err: err}
		}
	}
	m.covered = m.covered.add(m.sourcesOfCopies(), minPiece)
	if err := m.fill(ctx); err != nil {
		return nil, err
	}
	p := m.plan()
	p.Sketch = sketch
	return p, nil
}
