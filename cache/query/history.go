package query

import (
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

const maxHistory = 200

// WithHistory adds the events of the entry that the peer may see, as many as fit into an answer, and
// returns the explanation.
func (q *Queries) WithHistory(
	p rights.Peer, key index.RequestKey, out *wire.Explanation,
) *wire.Explanation {
	all := q.index.Journal.History(key)
	out.Reason = wire.Valid(out.Reason)
	for i := len(all) - 1; i >= 0 && len(out.History) < maxHistory; i-- {
		if e := &all[i]; q.rights.MayHear(p, e) {
			out.History = append(out.History, event.Reply(q.complete(e)))
		}
	}
	slices.Reverse(out.History)
	shorten(out, wire.MaxReply-len(out.Record)-len(out.Reason)) // which the answer to a request has once more
	return out
}

// shorten drops first what is farthest from the decision: the oldest history, then the farthest
// neighbours.
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
