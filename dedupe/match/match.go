// Package match finds the bytes that context binaries share.
//
// A Sketch is a few hundred numbers that show which stored blobs are likely to share bytes with a
// new one; Candidates ranks them with memory that does not depend on their number. Sketches only
// select blobs to compare: bytes are always compared, because hashes may collide.
//
// Find finds the extents of a recipe. It reads the target once and lists its anchors: positions
// that depend only on the bytes there, about one in a KiB. Then it scans each candidate, and at an
// anchor that both have, it compares the bytes in both directions as far as they are equal. It also
// finds bytes that the target has twice. Runs without anchors, such as zeros, are found next to
// other matches.
//
// The caller checks scopes: a private blob may use shared bases and those of the same user, never
// another user's.
//
// The package is safe for concurrent use. Start with Find and Candidates.
package match

import (
	"bytes"
	"context"
	"fmt"
	"sync"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// defaultMinMatch is the least length of a match, because an extent takes about ten bytes in a
// recipe and a read when the blob is restored. With denser anchors, proportionally shorter matches
// are found.
const defaultMinMatch = 1 << 10

// minMinMatch is the least length with the densest anchors. Shorter runs hardly ever save bytes.
const minMinMatch = windowSize

const minPiece = 64 // least bytes that remain of a match when another one covers the rest

// maxHeldMatches is the largest target that is held in memory while it is matched. Small targets
// have dense anchors, with tens of thousands of short matches and gaps, and reading each from the
// file would take longer than comparing it.
const maxHeldMatches = 16 << 20

// heldMatchBytes reuses that memory, because the system provides new memory slowly, page by page.
var heldMatchBytes = sync.Pool{New: func() any { return new([maxHeldMatches]byte) }}

// Candidate is a base that Find looks for shared bytes in.
type Candidate struct {
	Digest cas.Digest
	Source dedupe.Source
}

// Near returns the candidates for a target with that sketch.
type Near func(context.Context, Sketch) ([]Candidate, error)

// stats counts the work of Find; it is the same for the same input.
type stats struct {
	scanned  int64 // bytes scanned for anchors
	compared int64 // bytes of the target that were compared with others
}

// Find reads all of target, on all cores, calls near with its sketch, and finds the bytes that the
// target shares with the candidates from near, in their order, and within itself. The plan covers
// all of the target. Candidates must be whole, different, and not the target, and there must be
// fewer than MaxBases.
//
// Bytes are always compared. The work is linear in the sizes for any bytes: each part of a
// candidate has a bound for comparisons in vain, and bytes that are missed become literals. Memory
// is less than 100 MB for any size. The same input gives the same plan.
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
	selfCopies cover // ranges of the target that equal earlier ones
	covered    cover // ranges of the target that candidates have
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
	// Sized for the number of anchors in random bytes.
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
