package query

import (
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/unixsock/wire"
)

// Reply is the layout as clients are told of it, as far as it fits.
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
	files   map[cas.Digest]*wire.Sharer // of holders: a file that each is; nil: not asked for
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
			by := r.files[d]
			if by == nil {
				by = &wire.Sharer{}
			}
			r.reply.HeldBy = append(r.reply.HeldBy, by)
			r.size += proto.Size(by) + 4
		}
	}
	return at
}

// add takes a file in as far as there is room: names go first, then the file.
func (r *layoutReply) add(f *LaidFile) {
	out := &wire.LaidFile{Build: f.Build.BuildKey.String(), ModelName: wire.Clip(f.Build.ModelName), ModelDigest: f.Build.ModelDigest.String(), Ep: wire.Clip(f.EP),
		Name: wire.Clip(f.Name), Digest: f.Digest.String(), Size: f.Size, SharedBytes: f.Shared,
		Packed: f.Packed, OwnBytes: f.Own, Unknown: wire.Clip(f.Unknown),
		NamedBytes: f.NamedBytes, CompressedBytes: f.Compressed,
		Shapes: wire.Clip(identity.Shapes(&f.Build)), Sharers: f.Sharers}
	for _, p := range f.Pieces {
		out.Pieces = append(out.Pieces, &wire.Piece{At: p.At, Length: p.Length, Holder: r.holder(p.Holder), From: p.From})
	}
	n := proto.Size(out)
	if r.size+n > wire.MaxReply {
		r.reply.More++
		r.reply.MoreBytes += f.Size
		return
	}
	r.size += n
	for _, t := range f.Tensors {
		one := &wire.Placed{Name: wire.Valid(t.Name), Kind: t.Kind, Type: wire.Valid(t.Type), Shape: wire.Valid(t.Shape), Offset: t.Offset, Length: t.Length,
			Holder: r.holder(t.Holder), From: t.From, SharedBytes: t.Shared}
		for _, at := range t.With {
			one.With = append(one.With, uint32(at))
		}
		if n := proto.Size(one) + 4; r.size+n <= wire.MaxReply {
			r.size += n
			out.Tensors = append(out.Tensors, one)
		} else {
			out.MoreTensors++
		}
	}
	out.MoreTensors += uint32(f.MoreTensors)
	r.reply.Files = append(r.reply.Files, out)
}
