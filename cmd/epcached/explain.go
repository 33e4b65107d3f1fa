package main

import (
	"context"
	"encoding/hex"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/requests"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// maxReply keeps an answer whose length nobody knows before well inside a frame.
const maxReply = unixsock.MaxFrame - 64<<10

// Why explains an entry.
func (b *backend) Why(ctx context.Context, p unixsock.Peer, w *wire.Why) (*wire.Explanation, error) {
	e, err := b.cache.Why(ctx, peer(p), w.Entry)
	if err != nil {
		return nil, err
	}
	return explanationReply(e, maxReply), nil
}

// explanationReply takes at most so many bytes, if its reason and what is first of everything do.
func explanationReply(e *cache.Explanation, limit int) *wire.Explanation {
	out := &wire.Explanation{Decision: e.Decision, Reason: valid(e.Reason), RequestKey: keyText(e.RequestKey), Record: e.Record, Runtime: e.Runtime}
	for i := range e.Candidates {
		c := &e.Candidates[i]
		out.Candidates = append(out.Candidates, &wire.Candidate{Build: buildReply(&c.Listing), Served: c.Served,
			Reason: valid(c.Reason), Differences: differencesReply(c.Differences)})
	}
	for _, n := range e.Neighbours {
		out.Neighbours = append(out.Neighbours, &wire.Neighbour{RequestKey: n.RequestKey.String(), ModelName: n.ModelName,
			Builds: uint32(n.Builds), Differences: differencesReply(n.Differences)})
	}
	for i := range e.History {
		out.History = append(out.History, eventReply(&e.History[i]))
	}
	shorten(out, limit)
	return out
}

func differencesReply(list []requests.Difference) []*wire.Difference {
	out := make([]*wire.Difference, 0, len(list))
	for _, d := range list {
		out = append(out, &wire.Difference{Field: d.Field, Asked: valid(d.Asked), Found: valid(d.Found)})
	}
	return out
}

// shorten drops first what is farthest from the decision: the oldest history, then the least like neighbours.
func shorten(e *wire.Explanation, limit int) {
	for proto.Size(e) > limit {
		switch {
		case len(e.History) > 0:
			e.History = e.History[(len(e.History)+1)/2:]
		case len(e.Neighbours) > 0:
			e.Neighbours = e.Neighbours[:len(e.Neighbours)/2]
		case len(e.Candidates) > 0:
			e.Candidates = e.Candidates[:len(e.Candidates)/2]
		case e.Record != "":
			e.Record = ""
		default:
			return
		}
	}
}

// keyText writes a key as people and clients know it; a zero key is that of nothing.
func keyText(key [32]byte) string {
	if key == [32]byte{} {
		return ""
	}
	return hex.EncodeToString(key[:])
}

// valid makes text that protobuf takes: compilers and drivers say anything.
func valid(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }
