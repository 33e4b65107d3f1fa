package query

import (
	"cmp"
	"context"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// Layout describes where the bytes of builds' files are stored.
type Layout struct {
	Files     []FileLayout
	More      uint64 // number of files left out, because others are larger
	MoreBytes int64
}

// FileLayout is one file of one build.
type FileLayout struct {
	index.File
	Build  index.Build
	Text   *wire.FileLayout // for clients, without pieces
	Pieces []Piece          // the whole file, in order
}

// Piece is a range of a file, with the blob that stores its bytes.
type Piece struct {
	At, Length int64
	Holder     cas.Digest // the file itself, or another blob
	From       int64      // offset in the holder
}

const (
	maxFiles    = 200      // files of one layout
	maxPieces   = 512      // of one file; smaller ones are reported together
	finePieces  = 1 << 12  // of one file while it is compared
	minFileSize = 64 << 10 // smaller files, mostly graphs, are left out
)

// Layout lays out the files of the builds that the names mean, or without names of all builds that
// the peer may see. It returns the largest files, at most most of them. An unpacked file that
// shares bytes is compared with others, which takes as long as reading it.
func (q *Queries) Layout(ctx context.Context, p rights.Peer, names []string,
	most int) (*Layout, error) {
	if most <= 0 || most > maxFiles {
		most = maxFiles
	}
	out := &Layout{}
	err := q.eachForLayout(ctx, p, names, func(b *index.Build) error {
		for _, f := range b.Files {
			if f.Size >= minFileSize || len(names) > 0 {
				out.Files = append(out.Files, FileLayout{File: f, Build: *b})
			}
		}
		if len(out.Files) >= 4*most { // occasionally, because there may be millions of files
			out.largest(most)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	out.largest(most)
	kin, err := q.newSharedBytes(ctx)
	if err != nil {
		return nil, Error(ctx, err)
	}
	for i := range out.Files {
		f := &out.Files[i]
		f.Text = q.fileReply(f)
		var err error
		if f.Pieces, err = kin.piecesOf(ctx, f.Digest, f.Size); err != nil {
			// on an error, which check reports
			f.Pieces = []Piece{{Length: f.Size, Holder: f.Digest}}
		}
		if err != nil && (ctx.Err() != nil || !packing.IsMissingOrDamaged(err)) {
			return nil, Error(ctx, err)
		}
	}
	out.countShared()
	for i := range out.Files {
		out.Files[i].Pieces = mergePieces(out.Files[i].Pieces, maxPieces)
	}
	return out, nil
}

// fileReply returns the description of a file without its shared bytes.
func (q *Queries) fileReply(f *FileLayout) *wire.FileLayout {
	out := &wire.FileLayout{Build: f.Build.BuildKey.String(),
		ModelName: wire.Clip(f.Build.ModelName), ModelDigest: f.Build.ModelDigest.String(),
		Ep: wire.Clip(FirstEP(&f.Build)), Shapes: wire.Clip(identity.DimensionsText(&f.Build)),
		Name: wire.Clip(f.Name), Digest: f.Digest.String(), Size: f.Size, OwnBytes: f.Size,
		Packed: q.packing.OnlyPacked(f.Digest)}
	if recipe, there := q.packing.Recipes.Has(f.Digest); out.Packed && there {
		out.OwnBytes, out.CompressedBytes = packedBytes(&recipe), recipe.Compressed
	}
	return out
}

// largest keeps only the largest files, at most most of them.
func (l *Layout) largest(most int) {
	slices.SortStableFunc(l.Files, func(a, b FileLayout) int { return cmp.Compare(b.Size, a.Size) })
	for _, f := range l.Files[min(most, len(l.Files)):] {
		l.More++
		l.MoreBytes += f.Size
	}
	l.Files = l.Files[:min(most, len(l.Files))]
}

// countShared counts bytes that files take from each other. Files that are one blob share all.
func (l *Layout) countShared() {
	builds, taken := make(map[cas.Digest]int), make(map[cas.Digest][]Piece)
	for i := range l.Files {
		f := &l.Files[i]
		if builds[f.Digest]++; builds[f.Digest] > 1 {
			continue
		}
		for _, p := range f.Pieces {
			if p.Holder != f.Digest {
				taken[p.Holder] = append(taken[p.Holder], p)
			}
		}
	}
	for i := range l.Files {
		f := &l.Files[i]
		if builds[f.Digest] > 1 {
			f.Text.SharedBytes = f.Size
			continue
		}
		shared := taken[f.Digest]
		for _, p := range f.Pieces {
			// counted once, although others may take these bytes from this file too
			if p.Holder != f.Digest {
				shared = append(shared, Piece{Length: p.Length, Holder: f.Digest, From: p.At})
			}
		}
		for _, r := range rangesIn(shared, map[cas.Digest]bool{f.Digest: true})[f.Digest] {
			f.Text.SharedBytes += r.Length
		}
	}
}

// eachForLayout is EachNamed, or calls fn with all builds that the peer may see.
func (q *Queries) eachForLayout(ctx context.Context, p rights.Peer, names []string,
	fn func(*index.Build) error) error {
	if len(names) > 0 {
		return q.EachNamed(ctx, p, names, func(b *index.Build) error {
			if b.Layer != "" {
				return nil // a layer's build takes no space in this store
			}
			return fn(b)
		})
	}
	err := q.index.Each(ctx, func(b index.Build) error {
		if q.rights.MaySee(p, b.ID, b.Scope) {
			return fn(&b)
		}
		return nil
	})
	if err != nil {
		return Error(ctx, err)
	}
	return nil
}

// firstEP names the first execution provider of a build, "" if it has none.
func FirstEP(b *index.Build) string {
	if len(b.EPs) == 0 {
		return ""
	}
	return b.EPs[0].Name
}

// sharedBytes finds the bytes that blobs share, and remembers the result for each blob.
type sharedBytes struct {
	q *Queries
	// buildsOf has, for blobs that contain literals, the packed blob that the literals belong to.
	buildsOf map[cas.Digest]cas.Digest
	wholeAt  map[cas.Digest][]dedupe.Extent
	pieces   map[cas.Digest][]Piece
}

func (q *Queries) newSharedBytes(ctx context.Context) (*sharedBytes, error) {
	k := &sharedBytes{q: q, pieces: make(map[cas.Digest][]Piece),
		buildsOf: make(map[cas.Digest]cas.Digest), wholeAt: make(map[cas.Digest][]dedupe.Extent)}
	return k, q.packing.Recipes.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		if p.Literals >= 0 && p.Literals < len(p.Bases) {
			k.buildsOf[p.Bases[p.Literals].Digest] = d
		}
		return nil
	})
}

func (k *sharedBytes) piecesOf(ctx context.Context, d cas.Digest, size int64) ([]Piece, error) {
	if known, ok := k.pieces[d]; ok {
		return known, nil
	}
	pieces := []Piece{{Length: size, Holder: d}}
	switch bases, extents, own, err := k.extentsOf(ctx, d); {
	case err != nil:
		return nil, err
	case extents != nil:
		pieces = make([]Piece, 0, len(extents))
		for _, e := range extents {
			// its own bytes, or a run such as zeros, which is not reported
			if e.Base == own || e.Period > 0 {
				pieces = append(pieces, Piece{At: e.At, Length: e.Length, Holder: d, From: e.At})
				continue
			}
			pieces = k.appendPiece(pieces,
				Piece{At: e.At, Length: e.Length, Holder: bases[e.Base].Digest, From: e.From})
		}
	}
	pieces = mergePieces(pieces, finePieces)
	k.pieces[d] = pieces
	return pieces, nil
}

// appendPiece appends a piece. A piece in the literals of another blob is reported at its offset in
// that blob, because users do not know the digest of literals.
func (k *sharedBytes) appendPiece(pieces []Piece, p Piece) []Piece {
	d, ok := k.buildsOf[p.Holder]
	if !ok {
		return append(pieces, p)
	}
	stands, known := k.wholeAt[d]
	if !known {
		// on an error it was removed in the meantime, or check reports it
		if r, err := k.q.packing.Recipes.Get(d); err == nil {
			stands = literalsOf(r)
		}
		k.wholeAt[d] = stands
	}
	for _, e := range stands {
		if p.From < e.From {
			break // not in the blob: append it unchanged
		}
		if n := min(p.Length, e.From+e.Length-p.From); n > 0 {
			pieces = append(pieces, Piece{At: p.At, Length: n, Holder: d,
				From: e.At + p.From - e.From})
			p = Piece{At: p.At + n, Length: p.Length - n, Holder: p.Holder, From: p.From + n}
		}
		if p.Length == 0 {
			return pieces
		}
	}
	return append(pieces, p)
}

func literalsOf(r *dedupe.Recipe) (out []dedupe.Extent) {
	for _, e := range r.Extents {
		if e.Base == r.Literals && e.Period == 0 {
			out = append(out, e)
		}
	}
	slices.SortStableFunc(out, func(a, b dedupe.Extent) int { return cmp.Compare(a.From, b.From) })
	return out
}

// extentsOf returns the extents of a blob, none if it shares no bytes. own is the index of the base
// with its own literals.
func (k *sharedBytes) extentsOf(ctx context.Context, d cas.Digest) (bases []dedupe.Base,
	extents []dedupe.Extent, own int, err error) {
	q := k.q
	if q.packing.OnlyPacked(d) {
		r, err := q.packing.Recipes.Get(d)
		if err != nil {
			return nil, nil, 0, err
		}
		if r.Frames != nil { // its own literals follow the bases
			return append(slices.Clone(r.Bases), dedupe.Base{}), r.Extents,
				len(r.Bases), nil
		}
		return r.Bases, r.Extents, r.Literals, nil
	}
	if q.packing.Sharing.Saving(d) == 0 {
		return nil, nil, 0, nil
	}
	m, err := q.packing.Sharing.Match(ctx, d, nil)
	if m == nil || err != nil {
		return nil, nil, 0, err
	}
	defer m.Close()
	own = slices.IndexFunc(m.Plan.Bases, func(one dedupe.Base) bool {
		return one.Digest.IsZero()
	})
	return m.Plan.Bases, m.Plan.Extents, own, nil
}

// mergePieces joins pieces until there are at most most: small ones are merged into their
// predecessors.
func mergePieces(all []Piece, most int) []Piece {
	for least := int64(4096); len(all) > most; least *= 2 {
		var out []Piece
		for _, p := range all {
			if n := len(out); n > 0 && (p.Length < least || p.Holder == out[n-1].Holder) {
				out[n-1].Length += p.Length
				continue
			}
			out = append(out, p)
		}
		all = out
	}
	return all
}

type byteRange struct{ From, Length int64 }

func rangesIn(pieces []Piece, holders map[cas.Digest]bool) map[cas.Digest][]byteRange {
	out := make(map[cas.Digest][]byteRange)
	for _, p := range pieces {
		if holders[p.Holder] {
			out[p.Holder] = append(out[p.Holder], byteRange{From: p.From, Length: p.Length})
		}
	}
	for holder, all := range out {
		slices.SortFunc(all, func(a, b byteRange) int { return cmp.Compare(a.From, b.From) })
		apart := all[:1]
		for _, r := range all[1:] {
			if last := &apart[len(apart)-1]; r.From > last.From+last.Length {
				apart = append(apart, r)
			} else {
				last.Length = max(last.Length, r.From+r.Length-last.From)
			}
		}
		out[holder] = apart
	}
	return out
}

// Reply returns the message for clients, with as many files as fit.
func (l *Layout) Reply() *wire.LayoutReply {
	r := &layoutReply{reply: wire.LayoutReply{More: l.More, MoreBytes: l.MoreBytes},
		holders: make(map[cas.Digest]uint32)}
	for i := range l.Files {
		r.add(&l.Files[i])
	}
	return &r.reply
}

type layoutReply struct {
	reply   wire.LayoutReply
	holders map[cas.Digest]uint32
	size    int
}

func (r *layoutReply) holder(d cas.Digest) uint32 {
	at, ok := r.holders[d]
	if !ok {
		at = uint32(len(r.reply.Holders))
		r.holders[d] = at
		r.reply.Holders = append(r.reply.Holders, d.String())
		r.size += 2 + len(r.reply.Holders[at])
	}
	return at
}

// add appends a file, or counts it as left out if the reply has no space for it.
func (r *layoutReply) add(f *FileLayout) {
	out := f.Text
	for _, p := range f.Pieces {
		out.Pieces = append(out.Pieces,
			&wire.Piece{At: p.At, Length: p.Length, Holder: r.holder(p.Holder), From: p.From})
	}
	n := proto.Size(out)
	if r.size+n > wire.MaxReply {
		r.reply.More++
		r.reply.MoreBytes += f.Size
		return
	}
	r.size += n
	r.reply.Files = append(r.reply.Files, out)
}
