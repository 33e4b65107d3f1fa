package packing

import (
	"context"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/dedupe/match"
)

// Matched is what a blob shares with others, as a recipe of it would say. The files are open until Close.
type Matched struct {
	Plan   *match.Plan // the container without a digest is what stands nowhere else
	target Source
	files  []*dedupe.File
}

// search says what a blob is compared with, and what a recipe of it has to save.
type search struct {
	least Gain
	also  []cas.Digest // besides those that its sketch says, as far as it may take from them
	not   []cas.Digest // nor with these
	users []cas.Digest // that are to take from the same: only what they may take from counts
	alone bool         // no other blob takes from it yet: its literals may be compressed
	gate  Gate
}

// Close closes them.
func (m *Matched) Close() {
	_ = m.target.Close() // read-only: nothing can be lost
	for _, f := range m.files {
		_ = f.Close() // likewise
	}
}

func (m *Matched) digests() (out []cas.Digest) {
	for _, one := range m.Plan.Containers {
		if !one.Digest.IsZero() { // the literals have no digest yet
			out = append(out, one.Digest)
		}
	}
	return out
}

// recipeBytes is what a plan's recipe takes, more or less: 10 bytes an extent.
func (m *Matched) recipeBytes() int64 {
	return 160 + 40*int64(len(m.Plan.Containers)) + 10*int64(len(m.Plan.Extents))
}

// saving is how many bytes on disk go when the whole form does.
func (m *Matched) saving() int64 {
	return cas.OnDisk(m.Plan.Size) - cas.OnDisk(m.Plan.LiteralSize()) - cas.OnDisk(m.recipeBytes())
}

func (m *Matched) frees(least Gain) bool {
	return m.Plan.Shares() && m.saving() >= least.of(m.Plan.Size)
}

// Match finds what a whole blob shares with those that it may take bytes from, all of them whole,
// and with itself: a weight-sharing group may have its weights once for each member. nil: it is too
// small for that. gate, which may be nil, is asked before each piece that is read.
func (s *Sharing) Match(ctx context.Context, d cas.Digest, gate Gate) (*Matched, error) {
	return s.match(ctx, d, search{gate: gate})
}

// match is Match of a blob in whichever form. The bytes of one that is packed are not verified.
func (s *Sharing) match(ctx context.Context, d cas.Digest, how search) (*Matched, error) {
	open := func() (Source, error) { return s.openWhole(ctx, d) }
	if s.OnlyPacked(d) {
		open = func() (Source, error) { return s.Look(d) }
	}
	target, err := open()
	if err != nil {
		return nil, err
	}
	m := &Matched{target: target}
	if m.Plan, err = s.planFor(ctx, m, d, how); m.Plan == nil || err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// planFor is nil where a blob is too small. What it opens is m's.
func (s *Sharing) planFor(
	ctx context.Context, m *Matched, d cas.Digest, how search,
) (*match.Plan, error) {
	if m.target.Size() < Least {
		return nil, nil //nolint:nilnil // none
	}
	find := func(ctx context.Context, sketch match.Sketch) ([]match.Candidate, error) {
		if !s.hasSketch(d) {
			if err := s.saveSketch(d, sketch); err != nil { // first, so that later blobs find this one
				return nil, err
			}
		}
		near, err := s.near(ctx, d, sketch, how)
		if err != nil {
			return nil, err
		}
		return s.openCandidates(ctx, m, near, how.gate)
	}
	return match.Find(ctx, behind(ctx, m.target, how.gate), find)
}

func (s *Sharing) openCandidates(ctx context.Context, m *Matched, near []cas.Digest, gate Gate) ([]match.Candidate, error) {
	var all []match.Candidate
	for _, one := range near {
		f, err := s.openWhole(ctx, one)
		if Lost(err) {
			continue // who needs it will find out
		}
		if err != nil {
			return nil, err
		}
		m.files = append(m.files, f)
		all = append(all, match.Candidate{Digest: one, Source: behind(ctx, f, gate)})
	}
	return all, nil
}

// behind gives a source that is read only when the gate opens.
func behind(ctx context.Context, s dedupe.Source, gate Gate) dedupe.Source {
	if gate == nil {
		return s
	}
	return &gatedSource{s, ctx, gate}
}

type gatedSource struct {
	dedupe.Source
	ctx  context.Context //nolint:containedctx // ReadAt has none
	gate Gate
}

// ReadAt is io.ReaderAt.
func (g *gatedSource) ReadAt(p []byte, off int64) (int, error) {
	if err := g.gate(g.ctx); err != nil {
		return 0, err
	}
	return g.Source.ReadAt(p, off)
}
