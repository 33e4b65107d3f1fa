package packing

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"iter"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/dedupe/match"
)

// MinBlobSize is the size in bytes below which a blob is not read, because too little can be saved.
const MinBlobSize = 256 << 10

// Sharing finds out what blobs share, and keeps that beside them.
type Sharing struct {
	reader
	memory *memories
	owner  Owner
}

// maxCandidates bounds how many blobs one is compared with.
const maxCandidates = 16

// addSketch makes the sketch of a whole blob by reading it, unless there is one.
func (s *Sharing) addSketch(ctx context.Context, d cas.Digest, gate Gate) error {
	if s.hasSketch(d) {
		return nil
	}
	f, err := s.openWhole(ctx, d)
	if err != nil {
		return err
	}
	made, err := match.SketchOf(ctx, gated(ctx, f, gate))
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return s.saveSketch(d, made)
}

// hasSketch reports whether the index has a sketch of the blob in today's format.
func (s *Sharing) hasSketch(d cas.Digest) bool {
	raw, _ := s.memory.sketches.Get(d[:])
	_, err := match.DecodeSketch(raw) // of none: an error
	return err == nil
}

func (s *Sharing) saveSketch(d cas.Digest, made match.Sketch) error {
	raw, err := made.AppendBinary(nil)
	if err != nil {
		return err
	}
	defer s.forgetIfRemoved(d)
	return s.memory.sketches.Save(d[:], raw)
}

func (s *Sharing) saveShare(d cas.Digest, found Share) error {
	defer s.forgetIfRemoved(d)
	return s.memory.shares.Save(d[:], found.encode())
}

// eachBlob calls fn with every row of a table, and stops at its first error, which it returns.
func eachBlob(ctx context.Context, t Table, fn func(d cas.Digest, raw []byte) error) error {
	return t.Each(ctx, func(key, raw []byte) error {
		if len(key) != len(cas.Digest{}) {
			return nil
		}
		return fn(cas.Digest(key), raw)
	})
}

// forgetIfRemoved drops the new share of a removed blob, because the removal came too early for it.
func (s *Sharing) forgetIfRemoved(d cas.Digest) {
	if !s.whole.Has(d) && !s.recipeStore.HasOrRead(d) {
		s.memory.dropSharing(d)
	}
}

// nearBlobs lists the whole blobs that one may refer to and probably shares bytes with, the best
// first, after those that the search names. A blob with a recipe, or with one that is worth it, is
// no good base: it could be removed itself. One that shares only with itself has all of its bytes.
func (s *Sharing) nearBlobs(ctx context.Context, d cas.Digest, own match.Sketch,
	how search) ([]cas.Digest, error) {
	if own.Size < MinBlobSize {
		return nil, nil
	}
	may, err := s.mayTake(append(how.dependents, d))
	if err != nil {
		return nil, err
	}
	var out []cas.Digest
	for _, other := range how.include {
		if s.whole.Has(other) && !slices.Contains(how.exclude, other) &&
			!slices.Contains(out, other) {
			if ok, err := may(other); err != nil {
				return nil, err
			} else if ok {
				out = append(out, other)
			}
		}
	}
	var failed error
	// Before they are ranked: one that is out of reach must not stand for another that is not.
	ranked := match.Candidates(own, s.sketches(ctx, &failed), func(other cas.Digest) bool {
		if other == d || s.mayBePacked(other) || slices.Contains(how.exclude, other) ||
			slices.Contains(out, other) {
			return false
		}
		ok, err := may(other)
		failed = cmp.Or(failed, err)
		return ok && err == nil
	}, maxCandidates)
	return append(out, ranked...), failed
}

// sketches yields those of all blobs. An error is added to failed.
func (s *Sharing) sketches(ctx context.Context, failed *error) iter.Seq2[cas.Digest, match.Sketch] {
	return func(yield func(cas.Digest, match.Sketch) bool) {
		*failed = errors.Join(*failed,
			eachBlob(ctx, s.memory.sketches, func(other cas.Digest, raw []byte) error {
				// else made again when it is looked at
				if theirs, err := match.DecodeSketch(raw); err == nil {
					yield(other, theirs)
				}
				return nil
			}))
	}
}

// Sketch returns the encoded sketch of a blob, and reads the blob if there is none yet.
func (s *Sharing) Sketch(ctx context.Context, d cas.Digest) ([]byte, error) {
	if !s.hasSketch(d) {
		src, err := s.OpenUnverified(d)
		if err != nil {
			return nil, err
		}
		made, err := match.SketchOf(ctx, src)
		if err = errors.Join(err, src.Close()); err == nil {
			err = s.saveSketch(d, made)
		}
		if err != nil {
			return nil, err
		}
	}
	raw, _ := s.memory.sketches.Get(d[:])
	return raw, nil
}

// Near lists at most n whole blobs that probably share bytes with one that is not here and has this
// encoded sketch, the best first. Blobs of which may says no are left out.
func (s *Sharing) Near(ctx context.Context, sketch []byte, may func(cas.Digest) bool,
	n int) ([]cas.Digest, error) {
	own, err := match.DecodeSketch(sketch)
	if err != nil {
		return nil, err
	}
	return match.Candidates(own, s.sketches(ctx, &err), func(d cas.Digest) bool {
		return s.whole.Has(d) && may(d)
	}, n), err
}

// mayTake returns what reports whether all of these blobs may take bytes of another one.
func (s *Sharing) mayTake(all []cas.Digest) (func(from cas.Digest) (bool, error), error) {
	var each []func(cas.Digest) (bool, error)
	for _, d := range all {
		may, err := s.owner.MayTake(d)
		if err != nil {
			return nil, err
		}
		each = append(each, may)
	}
	return func(from cas.Digest) (bool, error) {
		for _, may := range each {
			if ok, err := may(from); !ok || err != nil {
				return false, err
			}
		}
		return true, nil
	}, nil
}

// mayBePacked reports whether a blob is packed, or could be with bytes of others, so that it is no
// good base. One that others take from already is.
func (s *Sharing) mayBePacked(d cas.Digest) bool {
	if _, packed := s.recipeStore.Has(d); packed || !s.whole.Has(d) {
		return true
	}
	found, _ := s.knownShare(d)
	return len(found.From) > 0 && !found.Little && len(s.recipeStore.Users(d)) == 0 &&
		s.Saving(d) > 0
}

// Share is what is known of a blob: what packing it would save, and which blobs it would take from.
type Share struct {
	Saving int64 // bytes on disk; 0: it is not worth it
	From   []cas.Digest
	Little bool // it saves little, which is worth it only by hand: see Gain
}

// A share, a value of the index: version u8, 3; flags u8: 1 if it is little; saving i64; digests of
// the bases, 32 each. Bit 2 of the flags was set by earlier versions, which noted by it what
// compressing had gained too little of. Versions 1 and 2 count as if nothing were known.
const (
	shareVersion = 3
	shareLittle  = 1
	shareFlags   = 3
)

func (o Share) encode() []byte {
	head := []byte{shareVersion, 0}
	if o.Little {
		head[1] = shareLittle
	}
	b := binary.LittleEndian.AppendUint64(head, uint64(o.Saving))
	for _, d := range o.From {
		b = append(b, d[:]...)
	}
	return b
}

func decodeShare(b []byte) (o Share, ok bool) {
	const head = 2 + 8
	if len(b) < head || b[0] != shareVersion || b[1] > shareFlags || (len(b)-head)%32 != 0 {
		return o, false
	}
	o.Little, b = b[1]&shareLittle != 0, b[2:]
	o.Saving = int64(binary.LittleEndian.Uint64(b))
	for at := 8; at < len(b); at += 32 {
		o.From = append(o.From, cas.Digest(b[at:at+32]))
	}
	return o, o.Saving >= 0
}

// knownShare is what is known of a blob; false: nothing.
func (s *Sharing) knownShare(d cas.Digest) (Share, bool) {
	raw, _ := s.memory.shares.Get(d[:])
	return decodeShare(raw) // of none: false
}

// IsKnown reports whether it is known what a blob shares.
func (s *Sharing) IsKnown(d cas.Digest) bool {
	_, known := s.knownShare(d)
	return known
}

// EachShare calls fn for every blob that packing may save space for; some may have changed since.
func (s *Sharing) EachShare(ctx context.Context, fn func(d cas.Digest, found Share) error) error {
	return eachBlob(ctx, s.memory.shares, func(d cas.Digest, raw []byte) error {
		if found, ok := decodeShare(raw); ok && found.Saving > 0 {
			return fn(d, found)
		}
		return nil
	})
}

// Saving is how many bytes on disk packing a blob would free, be it little, as far as is known and
// still true. It reads no blob.
func (s *Sharing) Saving(d cas.Digest) int64 {
	found, ok := s.knownShare(d)
	if !ok || !s.whole.Has(d) || s.stale(found) {
		return 0
	}
	return found.Saving
}

// stale reports whether a blob that it would take from is not whole any more.
func (s *Sharing) stale(found Share) bool {
	return slices.ContainsFunc(found.From, func(from cas.Digest) bool { return !s.whole.Has(from) })
}

// DropStale drops a stale share of a whole blob, so that the blob is read again, and reports that.
func (s *Sharing) DropStale(d cas.Digest, found Share) bool {
	if !s.stale(found) || !s.whole.Has(d) {
		return false
	}
	s.memory.dropShare(d)
	return true
}

// Examine finds out and keeps what a whole blob shares, its sketch first: later blobs find it then.
func (s *Sharing) Examine(ctx context.Context, d cas.Digest, gate Gate) (Share, error) {
	m, err := s.Match(ctx, d, gate)
	if err != nil {
		return Share{}, err
	}
	var out Share
	if m != nil {
		defer m.Close()
		if m.isWorth(Little) {
			out.Saving, out.From, out.Little = m.saving(), m.digests(), !m.isWorth(Worth)
		}
		if out.Saving == 0 || out.Little {
			s.requeueSmaller(m.Plan)
		}
	}
	return out, s.saveShare(d, out)
}

// requeueSmaller has earlier, smaller blobs read again that this one has much of, so that they can
// be packed. It skips larger ones, because two blobs could cause each other to be read for ever.
func (s *Sharing) requeueSmaller(p *match.Plan) {
	taken := make([]int64, len(p.Bases))
	for _, e := range p.Extents {
		taken[e.Base] += e.Length
	}
	for i, one := range p.Bases {
		if found, known := s.knownShare(one.Digest); known &&
			!slices.ContainsFunc(found.From, s.whole.Has) && one.Size < p.Size &&
			taken[i] >= Worth.minimum(one.Size) {
			s.memory.dropShare(one.Digest)
		}
	}
}

// ReexamineStale is Examine if the share is stale: what it would take from may have been removed.
func (s *Sharing) ReexamineStale(ctx context.Context, d cas.Digest, gate Gate) error {
	if found, known := s.knownShare(d); !known || !s.whole.Has(d) || !s.stale(found) {
		return nil
	}
	_, err := s.Examine(ctx, d, gate)
	return err
}

// RefreshSketches drops sketches of other versions of the daemon, and their shares, so that their
// blobs are read again. It remakes the sketches of bases that only recipes need itself.
func (s *Sharing) RefreshSketches(ctx context.Context, gate Gate) error {
	var old []cas.Digest
	err := eachBlob(ctx, s.memory.sketches, func(d cas.Digest, raw []byte) error {
		if _, err := match.DecodeSketch(raw); err != nil {
			old = append(old, d)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, d := range old {
		s.memory.dropSharing(d)
	}
	for _, d := range s.recipeStore.Bases() {
		if err := s.addSketch(ctx, d, gate); err != nil && !IsMissingOrDamaged(err) {
			return err
		}
	}
	return nil
}

// Matched is what a blob shares with others, as a recipe of it would say. The files are open until
// Close.
type Matched struct {
	Plan   *match.Plan // the base without a digest has the bytes that are nowhere else
	target Source
	files  []*dedupe.File
}

// search says what a blob is compared with, and what a recipe of it has to save.
type search struct {
	minGain    Gain
	include    []cas.Digest // besides those that its sketch says, as far as it may take from them
	exclude    []cas.Digest // nor with these
	dependents []cas.Digest // that are to take from the same: only what they may take from counts
	single     bool         // no other blob takes from it yet: its literals may be compressed
	gate       Gate
}

// Close closes them.
func (m *Matched) Close() {
	_ = m.target.Close() // read-only: nothing can be lost
	for _, f := range m.files {
		_ = f.Close() // likewise
	}
}

func (m *Matched) digests() (out []cas.Digest) {
	for _, one := range m.Plan.Bases {
		if !one.Digest.IsZero() { // the literals have no digest yet
			out = append(out, one.Digest)
		}
	}
	return out
}

// recipeBytes is what a plan's recipe takes, more or less: 10 bytes an extent.
func (m *Matched) recipeBytes() int64 {
	return 160 + 40*int64(len(m.Plan.Bases)) + 10*int64(len(m.Plan.Extents))
}

// saving is how many bytes on disk go when the whole form does.
func (m *Matched) saving() int64 {
	return cas.RoundUpToBlock(m.Plan.Size) - cas.RoundUpToBlock(m.Plan.LiteralSize()) -
		cas.RoundUpToBlock(m.recipeBytes())
}

func (m *Matched) isWorth(least Gain) bool {
	return m.Plan.Shares() && m.saving() >= least.minimum(m.Plan.Size)
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
		open = func() (Source, error) { return s.OpenUnverified(d) }
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

// planFor returns nil for a blob that is too small. m owns the files that it opens.
func (s *Sharing) planFor(ctx context.Context, m *Matched, d cas.Digest,
	how search) (*match.Plan, error) {
	if m.target.Size() < MinBlobSize {
		return nil, nil //nolint:nilnil // none
	}
	find := func(ctx context.Context, sketch match.Sketch) ([]match.Candidate, error) {
		if !s.hasSketch(d) {
			// first, so that later blobs find this one
			if err := s.saveSketch(d, sketch); err != nil {
				return nil, err
			}
		}
		near, err := s.nearBlobs(ctx, d, sketch, how)
		if err != nil {
			return nil, err
		}
		return s.openCandidates(ctx, m, near, how.gate)
	}
	return match.Find(ctx, gated(ctx, m.target, how.gate), find)
}

func (s *Sharing) openCandidates(ctx context.Context, m *Matched, near []cas.Digest,
	gate Gate) ([]match.Candidate, error) {
	var all []match.Candidate
	for _, one := range near {
		f, err := s.openWhole(ctx, one)
		if IsMissingOrDamaged(err) {
			continue // the next request finds out
		}
		if err != nil {
			return nil, err
		}
		m.files = append(m.files, f)
		all = append(all, match.Candidate{Digest: one, Source: gated(ctx, f, gate)})
	}
	return all, nil
}

// gated returns a source that is read only when the gate opens.
func gated(ctx context.Context, s dedupe.Source, gate Gate) dedupe.Source {
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
