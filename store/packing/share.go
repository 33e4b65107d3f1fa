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

// MinBlobSize is the smallest blob, in bytes, that is read for sharing. Smaller ones save too
// little.
const MinBlobSize = 256 << 10

// Sharing finds the bytes that blobs share, and records the results in the index.
type Sharing struct {
	reader
	memory *memories
	owner  Owner
}

// maxCandidates bounds the blobs that one is compared with.
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
	_, err := match.DecodeSketch(raw) // an error without a row
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

// forgetIfRemoved drops the new share of a removed blob, because the share was saved after the
// removal.
func (s *Sharing) forgetIfRemoved(d cas.Digest) {
	if !s.whole.Has(d) && !s.recipeStore.HasOrRead(d) {
		s.memory.dropSharing(d)
	}
}

// nearBlobs lists the whole blobs that are permitted as bases and probably share bytes with a blob,
// the best first, after those that the search names. A blob that is packed, or worth packing, is
// left out, because its whole file may be removed. One that shares bytes only within itself is not.
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
	// Filter before ranking, because an excluded blob must not displace a permitted one.
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

// sketches yields the sketches of all blobs, and adds errors to failed.
func (s *Sharing) sketches(ctx context.Context, failed *error) iter.Seq2[cas.Digest, match.Sketch] {
	return func(yield func(cas.Digest, match.Sketch) bool) {
		*failed = errors.Join(*failed,
			eachBlob(ctx, s.memory.sketches, func(other cas.Digest, raw []byte) error {
				// otherwise it is made again when the blob is read
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

// Near lists at most n whole blobs that probably share bytes with a blob of another store that has
// this encoded sketch, the best first. It omits blobs for which may is false.
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

// mayTake returns a function that reports whether a blob may be a base of all of these blobs.
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

// mayBePacked reports whether a blob is packed, or could be with other bases, so that it is no good
// base. A blob that is a base already is a good one.
func (s *Sharing) mayBePacked(d cas.Digest) bool {
	if _, packed := s.recipeStore.Has(d); packed || !s.whole.Has(d) {
		return true
	}
	found, _ := s.knownShare(d)
	return len(found.From) > 0 && !found.Little && len(s.recipeStore.Users(d)) == 0 &&
		s.Saving(d) > 0
}

// Share is the result of reading a blob: how many bytes packing it would save, and with which
// bases.
type Share struct {
	Saving int64 // bytes on disk; 0: not worth packing
	From   []cas.Digest
	Little bool // worth packing only on request: see Gain
}

// A share, a value of the index: version u8, 3; flags u8: 1 if it is little; saving i64; digests of
// the bases, 32 each. Bit 2 of the flags was used by earlier versions, and is ignored. Shares of
// versions 1 and 2 are not used.
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

// knownShare returns the recorded share of a blob, false if there is none.
func (s *Sharing) knownShare(d cas.Digest) (Share, bool) {
	raw, _ := s.memory.shares.Get(d[:])
	return decodeShare(raw) // false without a row
}

// IsKnown reports whether a blob has been read.
func (s *Sharing) IsKnown(d cas.Digest) bool {
	_, known := s.knownShare(d)
	return known
}

// EachShare calls fn for every recorded share, which may be stale.
func (s *Sharing) EachShare(ctx context.Context, fn func(d cas.Digest, found Share) error) error {
	return eachBlob(ctx, s.memory.shares, func(d cas.Digest, raw []byte) error {
		if found, ok := decodeShare(raw); ok && found.Saving > 0 {
			return fn(d, found)
		}
		return nil
	})
}

// Saving returns how many bytes on disk packing a blob would free, 0 if unknown or stale. It reads
// no blob.
func (s *Sharing) Saving(d cas.Digest) int64 {
	found, ok := s.knownShare(d)
	if !ok || !s.whole.Has(d) || s.stale(found) {
		return 0
	}
	return found.Saving
}

// stale reports whether one of the bases is not whole any more.
func (s *Sharing) stale(found Share) bool {
	return slices.ContainsFunc(found.From, func(from cas.Digest) bool { return !s.whole.Has(from) })
}

// DropStale drops the share of a whole blob if it is stale, so that the blob is read again, and
// reports whether it did.
func (s *Sharing) DropStale(d cas.Digest, found Share) bool {
	if !s.stale(found) || !s.whole.Has(d) {
		return false
	}
	s.memory.dropShare(d)
	return true
}

// Examine reads a whole blob and records its sketch, by which later blobs find it, and its share.
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

// requeueSmaller has earlier, smaller blobs read again that share many bytes with this one, so that
// they can be packed. It skips larger ones, because otherwise two blobs could cause each other to
// be read for ever.
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

// ReexamineStale calls Examine if the blob's share is stale.
func (s *Sharing) ReexamineStale(ctx context.Context, d cas.Digest, gate Gate) error {
	if found, known := s.knownShare(d); !known || !s.whole.Has(d) || !s.stale(found) {
		return nil
	}
	_, err := s.Examine(ctx, d, gate)
	return err
}

// RefreshSketches drops sketches from other versions of the daemon, and their shares, so that the
// packer reads these blobs again. For bases that only recipes need it makes new sketches itself.
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

// Matched has the bytes that a blob shares with others, as a plan for its recipe. The files are
// open until Close.
type Matched struct {
	Plan   *match.Plan // the base without a digest stands for the literals
	target Source
	files  []*dedupe.File
}

// search says with which blobs one is compared, and how much its recipe has to save.
type search struct {
	minGain    Gain
	include    []cas.Digest // compare with these too, if they are permitted as bases
	exclude    []cas.Digest // do not compare with these
	dependents []cas.Digest // the bases must be permitted for these blobs too
	gate       Gate
}

func (m *Matched) Close() {
	_ = m.target.Close() // opened for reading, so no data can be lost
	for _, f := range m.files {
		_ = f.Close() // as above
	}
}

func (m *Matched) digests() (out []cas.Digest) {
	for _, one := range m.Plan.Bases {
		if !one.Digest.IsZero() { // literals have no digest yet
			out = append(out, one.Digest)
		}
	}
	return out
}

// recipeBytes estimates the size of a plan's recipe, with 10 bytes for each extent.
func (m *Matched) recipeBytes() int64 {
	return 160 + 40*int64(len(m.Plan.Bases)) + 10*int64(len(m.Plan.Extents))
}

// saving returns how many bytes on disk replacing the whole file by the recipe frees.
func (m *Matched) saving() int64 {
	return cas.RoundUpToBlock(m.Plan.Size) - cas.RoundUpToBlock(m.Plan.LiteralSize()) -
		cas.RoundUpToBlock(m.recipeBytes())
}

func (m *Matched) isWorth(least Gain) bool {
	return m.Plan.Shares() && m.saving() >= least.minimum(m.Plan.Size)
}

// Match finds the bytes that a whole blob shares with other whole blobs that are permitted as
// bases, and within itself, because a group may have its weights once for each member. It returns
// nil for a blob that is too small. gate, which may be nil, is called before each piece that is
// read.
func (s *Sharing) Match(ctx context.Context, d cas.Digest, gate Gate) (*Matched, error) {
	return s.match(ctx, d, search{gate: gate})
}

// match is Match for a whole or packed blob. It does not verify the bytes of a packed one.
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
			continue // the next request reports the error
		}
		if err != nil {
			return nil, err
		}
		m.files = append(m.files, f)
		all = append(all, match.Candidate{Digest: one, Source: gated(ctx, f, gate)})
	}
	return all, nil
}

// gated returns a source that calls the gate before each read.
func gated(ctx context.Context, s dedupe.Source, gate Gate) dedupe.Source {
	if gate == nil {
		return s
	}
	return &gatedSource{s, ctx, gate}
}

type gatedSource struct {
	dedupe.Source
	ctx  context.Context //nolint:containedctx // ReadAt has no context
	gate Gate
}

func (g *gatedSource) ReadAt(p []byte, off int64) (int, error) {
	if err := g.gate(g.ctx); err != nil {
		return 0, err
	}
	return g.Source.ReadAt(p, off)
}
