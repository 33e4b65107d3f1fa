package backend

import (
	"context"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/parallel"
	"github.com/epcached/epcached/unixsock"
)

// gates bound the requests that run at the same time, of each user and in all, where a request can
// take much memory. A request waits at a gate at most until its context ends.
type gates struct {
	small, large *keyed.Shares[uint32] // readings of models, of up to 256 KiB and up to 16 MiB
	hashing      *keyed.Shares[uint32] // of large files, a piece at a time
}

// maxRest bounds the rest of a slot, because reading a slow disk takes long without using the
// processor.
const maxRest = time.Second

// newGates returns the gates. crowded reports whether several users are served: the slots of a user
// with many requests then rest as those of unixsock do.
func newGates(crowded func() bool) gates {
	cores := parallel.Processors()
	g := gates{small: keyed.NewShares[uint32](max(16, 4*cores), max(1, cores/2)),
		large:   keyed.NewShares[uint32](6, 1),
		hashing: keyed.NewShares[uint32](8*cores, cores)}
	for _, s := range []*keyed.Shares[uint32]{g.small, g.large, g.hashing} {
		s.Rest = func(held time.Duration, waiting int) time.Duration {
			if waiting < 2*cores || !crowded() { // one file is hashed by as many callers as cores
				return 0
			}
			return min(unixsock.RestFactor*held, maxRest)
		}
	}
	return g
}

// withReadGate returns the context of a request with models that are read for the peer. Hashing is
// bounded for each user, because hundreds of large files of one user would delay other users.
func (b *Backend) withReadGate(ctx context.Context, p unixsock.Peer) context.Context {
	ctx = cas.WithPieceGate(ctx, func(ctx context.Context) (leave func(), err error) {
		return b.gates.hashing.Take(ctx, b.Owner(p.UID))
	})
	return epmodel.WithGate(ctx, func(ctx context.Context, large bool) (leave func(), err error) {
		if large {
			return b.gates.large.Take(ctx, b.Owner(p.UID))
		}
		return b.gates.small.Take(ctx, b.Owner(p.UID))
	})
}
