package backend

import (
	"context"

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/unixsock"
)

// gates bound the requests that run at the same time, of each user and in all, where a request can
// take much memory. Requests wait there, and no longer than their contexts last.
type gates struct {
	small, large *keyed.Shares[uint32] // readings of models, of up to 256 KiB and up to 16 MiB
}

func newGates() gates {
	return gates{small: keyed.NewShares[uint32](64, 8), large: keyed.NewShares[uint32](6, 2)}
}

// reading returns the context of a request whose models are read for the peer.
func (b *Backend) reading(ctx context.Context, p unixsock.Peer) context.Context {
	return epmodel.WithGate(ctx, func(ctx context.Context, large bool) (leave func(), err error) {
		if large {
			return b.gates.large.Take(ctx, b.Owner(p.UID))
		}
		return b.gates.small.Take(ctx, b.Owner(p.UID))
	})
}
