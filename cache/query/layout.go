package query

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// Layout describes where the bytes of builds' files are stored.
type Layout struct {
	Files     []FileLayout
	More      uint64 // number of files left out, because others are larger
	MoreBytes int64

	// Holders has, if tensors were requested, a build for each holder that is a file of a build. It
	// has none for blobs that only recipes need.
	Holders map[cas.Digest]*wire.Sharer
}

// FileLayout is one file of one build.
type FileLayout struct {
	index.File
	Build   index.Build
	Text    *wire.FileLayout // for clients, without pieces and tensors
	Pieces  []Piece          // the whole file, in order
	Tensors []NamedRange     // the named ranges in order, if they were requested
}

// Piece is a range of a file, with the blob that stores its bytes.
type Piece struct {
	At, Length int64
	Holder     cas.Digest // the file itself, or another blob
	From       int64      // offset in the holder
}

// NamedRange is a named range of a file.
type NamedRange struct {
	Text   *wire.NamedRange // for clients, without the holder
	Holder cas.Digest       // blob with its first byte
}

const (
	maxFiles       = 200      // files of one layout
	maxPieces      = 512      // of one file; smaller ones are reported together
	finePieces     = 1 << 12  // of one file while it is compared
	keptPieces     = 1 << 18  // of all files that are compared
	maxNamedRanges = 4096     // named ranges of one file: the largest
	allNamedRanges = 1 << 15  // of all files; more do not fit into an answer
	maxFamily      = 64       // blobs that one is compared with
	minFileSize    = 64 << 10 // smaller files, mostly graphs, are left out
)

// Layout lays out the files of the builds that the names mean, or without names of all builds that
// the peer may see. It returns the largest files, at most most of them. With tensors it also
// returns the tensors in them, and files that share these. An unpacked file that shares bytes is
// compared with others, which takes as long as reading it.
func (q *Queries) Layout(ctx context.Context, p rights.Peer, names []string, most int,
	tensors bool) (*Layout, error) {
	if most <= 0 || most > maxFiles {
		most = maxFiles
	}
	out := &Layout{}
	err := q.eachForLayout(ctx, p, names, func(b *index.Build) error {
		for _, f := range b.Files {
			if tensors || f.Size >= minFileSize || len(names) > 0 {
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
		if err == nil && tensors {
			err = kin.nameRanges(ctx, p, f)
		}
		if err != nil && (ctx.Err() != nil || !packing.IsMissingOrDamaged(err)) {
			return nil, Error(ctx, err)
		}
	}
	out.countShared()
	if tensors {
		if err := q.nameHolders(p, out); err != nil {
			return nil, Error(ctx, err)
		}
	}
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

func (q *Queries) nameHolders(p rights.Peer, l *Layout) error {
	l.Holders = make(map[cas.Digest]*wire.Sharer)
	looked := make(map[cas.Digest]bool)
	for i := range l.Files {
		for _, t := range l.Files[i].Tensors {
			if looked[t.Holder] {
				continue
			}
			looked[t.Holder] = true
			ids, err := q.index.Needs(t.Holder)
			if err != nil {
				return err
			}
			for _, id := range ids {
				b, err := q.index.Get(id)
				if err != nil || !q.rights.MaySee(p, b.ID, b.Scope) {
					continue // removed in the meantime, or not visible to the peer
				}
				if at := slices.IndexFunc(b.Files, func(f index.File) bool {
					return f.Digest == t.Holder
				}); at >= 0 {
					l.Holders[t.Holder] = sharer(&b, at)
					break
				}
			}
		}
	}
	return nil
}

func sharer(b *index.Build, file int) *wire.Sharer {
	return &wire.Sharer{Build: b.BuildKey.String(), ModelName: wire.Clip(b.ModelName),
		Ep: wire.Clip(FirstEP(b)), File: wire.Clip(b.Files[file].Name)}
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
	// dependents has the blobs that are, or could be, packed, by the blobs that are their bases.
	dependents map[cas.Digest][]cas.Digest
	// buildsOf has, for blobs that contain literals, the packed blob that the literals belong to.
	buildsOf map[cas.Digest]cas.Digest
	wholeAt  map[cas.Digest][]dedupe.Extent
	pieces   map[cas.Digest][]Piece
	cached   int // number of pieces in total
	named    int // number of named ranges in total
}

func (q *Queries) newSharedBytes(ctx context.Context) (*sharedBytes, error) {
	k := &sharedBytes{q: q, dependents: make(map[cas.Digest][]cas.Digest),
		pieces:   make(map[cas.Digest][]Piece),
		buildsOf: make(map[cas.Digest]cas.Digest), wholeAt: make(map[cas.Digest][]dedupe.Extent)}
	err := q.packing.Recipes.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		for i, from := range p.Bases {
			k.dependents[from.Digest] = append(k.dependents[from.Digest], d)
			if i == p.Literals {
				k.buildsOf[from.Digest] = d
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for literals, d := range k.buildsOf {
		k.dependents[d] = append(k.dependents[d], k.dependents[literals]...)
	}
	return k, q.packing.Sharing.EachShare(ctx, func(d cas.Digest, s packing.Share) error {
		if q.blobs.Has(d) {
			for _, from := range s.From {
				k.dependents[from] = append(k.dependents[from], d)
			}
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
	if k.cached += len(pieces); k.cached > keptPieces {
		k.cached = len(pieces)
		clear(k.pieces) // bounds the memory; they are computed again when needed
	}
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

func (k *sharedBytes) nameRanges(ctx context.Context, p rights.Peer, f *FileLayout) error {
	named, err := k.q.nameRanges(ctx, f)
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		f.Text.Unknown = wire.Clip(err.Error())
		return nil
	}
	f.Text.NamedBytes = namedBytes(named)
	most := min(maxNamedRanges, allNamedRanges-k.named)
	k.named += min(most, len(named))
	if len(named) > most {
		slices.SortStableFunc(named, func(a, b epmodel.Named) int {
			return cmp.Compare(b.Length, a.Length)
		})
		f.Text.MoreTensors = uint32(len(named) - most)
		named = named[:most]
		slices.SortStableFunc(named, func(a, b epmodel.Named) int {
			return cmp.Compare(a.Offset, b.Offset)
		})
	}
	relatives, err := k.relatives(ctx, p, f)
	if err != nil {
		return err
	}
	for _, n := range named {
		named := &wire.NamedRange{Name: wire.Valid(n.Name), Kind: n.Kind, Type: wire.Valid(n.Type),
			Shape: wire.Valid(n.Shape), Offset: n.Offset, Length: n.Length}
		one := NamedRange{Text: named}
		var parts []Piece
		for _, piece := range f.Pieces[firstAt(f.Pieces, n.Offset):] {
			if piece.At >= n.Offset+n.Length {
				break
			}
			from := max(n.Offset, piece.At) - piece.At
			parts = append(parts, Piece{At: piece.At + from,
				Length: min(piece.At+piece.Length, n.Offset+n.Length) - piece.At - from,
				Holder: piece.Holder, From: piece.From + from})
		}
		if len(parts) > 0 {
			one.Holder, named.From = parts[0].Holder, parts[0].From
		}
		for i, r := range relatives {
			shared := n.Length
			if !r.same {
				shared = r.overlap(parts)
			}
			named.SharedBytes = max(named.SharedBytes, shared)
			if 2*shared >= n.Length {
				named.With = append(named.With, uint32(i))
			}
		}
		f.Tensors = append(f.Tensors, one)
	}
	return nil
}

func firstAt(all []Piece, off int64) int {
	i, _ := slices.BinarySearchFunc(all, off, func(p Piece, off int64) int {
		return cmp.Compare(p.At+p.Length-1, off)
	})
	return i
}

type byteRange struct{ From, Length int64 }

type relatedFile struct {
	same   bool                       // both are the same blob
	ranges map[cas.Digest][]byteRange // by holder, sorted and not overlapping
}

func (r *relatedFile) overlap(parts []Piece) (sum int64) {
	for _, part := range parts {
		all := r.ranges[part.Holder]
		i, _ := slices.BinarySearchFunc(all, part.From, func(has byteRange, from int64) int {
			return cmp.Compare(has.From+has.Length-1, from)
		})
		for ; i < len(all) && all[i].From < part.From+part.Length; i++ {
			sum += min(part.From+part.Length, all[i].From+all[i].Length) -
				max(part.From, all[i].From)
		}
	}
	return sum
}

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

// wholeRangesIn is rangesIn for a whole blob, which also stores bytes that it could share with
// others.
func wholeRangesIn(d cas.Digest, size int64, pieces []Piece,
	holders map[cas.Digest]bool) map[cas.Digest][]byteRange {
	has := rangesIn(pieces, holders)
	if holders[d] {
		has[d] = []byteRange{{Length: size}}
	}
	return has
}

// relatives finds the files of other builds, visible to the peer, that may share bytes.
func (k *sharedBytes) relatives(ctx context.Context, p rights.Peer,
	f *FileLayout) (out []relatedFile, err error) {
	holders := map[cas.Digest]bool{f.Digest: true}
	for _, piece := range f.Pieces {
		holders[piece.Holder] = true
	}
	kin := make(map[cas.Digest]bool)
	for h := range holders {
		kin[h] = true
		for _, d := range k.dependents[h] {
			kin[d] = true
		}
	}
	list := slices.SortedFunc(maps.Keys(kin), cas.Digest.Compare)
	for _, d := range list[:min(len(list), maxFamily)] {
		ids, err := k.q.index.Needs(d)
		if err != nil {
			return nil, err
		}
		var has map[cas.Digest][]byteRange
		for _, id := range ids {
			b, err := k.q.index.Get(id)
			if err != nil || id == f.Build.ID || !k.q.rights.MaySee(p, b.ID, b.Scope) {
				continue
			}
			i := slices.IndexFunc(b.Files, func(one index.File) bool { return one.Digest == d })
			if i < 0 {
				continue
			}
			if has == nil && d != f.Digest {
				pieces, err := k.piecesOf(ctx, d, b.Files[i].Size)
				if err != nil {
					if ctx.Err() != nil || !packing.IsMissingOrDamaged(err) &&
						!errors.Is(err, packing.ErrInUse) {
						return nil, err
					}
					break
				}
				has = wholeRangesIn(d, b.Files[i].Size, pieces, holders)
			}
			out = append(out, relatedFile{same: d == f.Digest, ranges: has})
			f.Text.Sharers = append(f.Text.Sharers, sharer(&b, i))
		}
	}
	return out, nil
}

// Reply returns the message for clients, with as many files as fit.
func (l *Layout) Reply() *wire.LayoutReply {
	r := &layoutReply{reply: wire.LayoutReply{More: l.More, MoreBytes: l.MoreBytes},
		holders: make(map[cas.Digest]uint32), files: l.Holders}
	for i := range l.Files {
		r.add(&l.Files[i])
	}
	return &r.reply
}

type layoutReply struct {
	reply   wire.LayoutReply
	holders map[cas.Digest]uint32
	files   map[cas.Digest]*wire.Sharer // by holder: a file that it is; nil: not requested
	size    int
}

func (r *layoutReply) holder(d cas.Digest) uint32 {
	at, ok := r.holders[d]
	if !ok {
		at = uint32(len(r.reply.Holders))
		r.holders[d] = at
		r.reply.Holders = append(r.reply.Holders, d.String())
		r.size += 2 + len(r.reply.Holders[at])
		if r.files != nil {
			by := cmp.Or(r.files[d], &wire.Sharer{})
			r.reply.HeldBy = append(r.reply.HeldBy, by)
			r.size += proto.Size(by) + 4
		}
	}
	return at
}

// add appends a file. If there is too little space it leaves out names, and then the file.
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
	for _, t := range f.Tensors {
		one := t.Text
		one.Holder = r.holder(t.Holder)
		if n := proto.Size(one) + 4; r.size+n <= wire.MaxReply {
			r.size += n
			out.Tensors = append(out.Tensors, one)
		} else {
			out.MoreTensors++
		}
	}
	r.reply.Files = append(r.reply.Files, out)
}

// Names of tensors are found when they are requested, and are not stored: therefore the format of
// the store does not depend on them, and other requests do not pay for them. The names that a file
// itself has are trusted.

func (q *Queries) nameRanges(ctx context.Context, f *FileLayout) ([]epmodel.Named, error) {
	source, err := q.packing.OpenUnverified(f.Digest)
	if err != nil {
		return nil, err
	}
	defer source.Close() // opened for reading, so no data can be lost
	if f.Name != f.Build.Graph && !slices.ContainsFunc(f.Build.Members, func(m index.Member) bool {
		return m.Graph == f.Name
	}) {
		return q.nameBinary(ctx, f, source, epmodel.Range{Length: f.Size})
	}
	m, all, err := epmodel.NamedTensors(ctx, f.Name, source)
	if err != nil {
		return nil, err
	}
	for _, c := range m.Contexts {
		if c.Inline.Length == 0 {
			continue
		}
		inside, err := q.nameBinary(ctx, f, source, c.Inline)
		if err != nil {
			return nil, err
		}
		all = append(all, inside...)
	}
	if len(all) == 0 {
		f.Text.Unknown = "this graph has no tensors: they are in the files beside it"
	}
	epmodel.SortNamed(all)
	return all[:min(len(all), maxNames)], nil
}

const maxNames = 1 << 16

// nameBinary names the ranges of a context binary. It ignores names that contradict the file's
// size.
func (q *Queries) nameBinary(ctx context.Context, f *FileLayout, source epmodel.Source,
	within epmodel.Range) ([]epmodel.Named, error) {
	all, err := epmodel.NamedRanges(ctx, f.Name, epmodel.Within(source, within))
	if err != nil && !errors.As(err, new(*epmodel.FormatError)) {
		return nil, err
	}
	for i := range all {
		all[i].Offset += within.Offset
	}
	if slices.ContainsFunc(all, func(n epmodel.Named) bool {
		return n.Kind == epmodel.TensorKind
	}) {
		return all, nil
	}
	if f.Text.Unknown = "this type of file does not name its tensors"; err != nil {
		f.Text.Unknown = wire.Clip(err.Error())
	}
	return all, nil
}

func namedBytes(all []epmodel.Named) (sum int64) {
	end := int64(0)
	for _, n := range all {
		if n.Kind == epmodel.TensorKind && n.Offset+n.Length > end {
			sum += n.Offset + n.Length - max(n.Offset, end)
			end = n.Offset + n.Length
		}
	}
	return sum
}
