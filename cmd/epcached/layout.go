package main

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/requests"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// maxLayout bounds an answer, in bytes: a frame holds a MiB.
const maxLayout = 900 << 10

// Layout tells where the bytes of builds' files stand.
func (b *backend) Layout(ctx context.Context, p unixsock.Peer, w *wire.Layout) (*wire.LayoutReply, error) {
	l, err := b.cache.Layout(ctx, peer(p), w.Entries, int(w.Most), w.Tensors)
	if err != nil {
		return nil, err
	}
	r := &layoutReply{reply: wire.LayoutReply{More: l.More, MoreBytes: l.MoreBytes}, holders: make(map[string]uint32)}
	if w.Tensors {
		r.files = make(map[string]cache.Sharer, len(l.Holders))
		for d, s := range l.Holders {
			r.files[d.String()] = s
		}
	}
	for i := range l.Files {
		r.add(&l.Files[i])
	}
	return &r.reply, nil
}

// layoutReply is an answer while it grows.
type layoutReply struct {
	reply   wire.LayoutReply
	holders map[string]uint32
	files   map[string]cache.Sharer // of holders: a file that each is
	size    int
}

func (r *layoutReply) holder(digest fmt.Stringer) uint32 {
	d := digest.String()
	at, ok := r.holders[d]
	if !ok {
		at = uint32(len(r.reply.Holders))
		r.holders[d] = at
		r.reply.Holders = append(r.reply.Holders, d)
		r.size += 2 + len(r.reply.Holders[at])
		if r.files != nil {
			by := &wire.Sharer{}
			if s, ok := r.files[d]; ok {
				by = &wire.Sharer{Build: s.Build.BuildKey.String(), ModelName: clip(s.Build.ModelName), Ep: clip(s.EP), File: clip(s.File)}
			}
			r.reply.HeldBy = append(r.reply.HeldBy, by)
			r.size += proto.Size(by) + 4
		}
	}
	return at
}

// add takes a file in as far as there is room: names go first, then the file.
func (r *layoutReply) add(f *cache.LaidFile) {
	out := &wire.LaidFile{Build: f.Build.BuildKey.String(), ModelName: clip(f.Build.ModelName), ModelDigest: f.Build.ModelDigest.String(), Ep: clip(f.EP),
		Name: clip(f.Name), Digest: f.Digest.String(), Size: f.Size, SharedBytes: f.Shared, Packed: f.Packed, OwnBytes: f.Own, Unknown: clip(f.Unknown), NamedBy: clip(f.NamedBy), NamedBytes: f.NamedBytes, CompressedBytes: f.Compressed, Shapes: clip(requests.Shapes(&f.Build))}
	for _, p := range f.Pieces {
		out.Pieces = append(out.Pieces, &wire.Piece{At: p.At, Length: p.Length, Holder: r.holder(p.Holder), From: p.From})
	}
	for _, s := range f.Sharers {
		out.Sharers = append(out.Sharers, &wire.Sharer{Build: s.Build.BuildKey.String(), ModelName: clip(s.Build.ModelName), Ep: clip(s.EP), File: clip(s.File)})
	}
	n := proto.Size(out)
	if r.size+n > maxLayout {
		r.reply.More++
		r.reply.MoreBytes += f.Size
		return
	}
	r.size += n
	for _, t := range f.Tensors {
		one := &wire.Placed{Name: valid(t.Name), Kind: t.Kind, Type: valid(t.Type), Shape: valid(t.Shape), Form: t.Form, Offset: t.Offset, Length: t.Length,
			Holder: r.holder(t.Holder), From: t.From, SharedBytes: t.Shared}
		for _, at := range t.With {
			one.With = append(one.With, uint32(at))
		}
		if n := proto.Size(one) + 4; r.size+n <= maxLayout {
			r.size += n
			out.Tensors = append(out.Tensors, one)
		} else {
			out.MoreTensors++
		}
	}
	out.MoreTensors += uint32(f.MoreTensors)
	r.reply.Files = append(r.reply.Files, out)
}
