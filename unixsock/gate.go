package unixsock

import (
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/unixsock/wire"
)

// gates bound how many requests about the whole store run at the same time, for each user and in
// all, because their memory and their answers are large. Such a request holds its slot until its
// answer is written, so that a client that does not read keeps few answers in memory.
// Administrators have gates of their own, so that no other user can keep them waiting.
type gates struct {
	pages   *keyed.Shares[account] // a page each of memory
	surveys *keyed.Shares[account] // memory for each build of the store
	works   *keyed.Shares[account] // run long, and read files
}

func newGates() gates {
	return gates{pages: keyed.NewShares[account](8, 2), surveys: keyed.NewShares[account](2, 1),
		works: keyed.NewShares[account](8, 2)}
}

// gate returns the gate that a request has to pass, nil for one that concerns a build or a job.
func (c *connection) gate(message proto.Message) *keyed.Shares[account] {
	g := &c.server.gates[0]
	if c.account.administrator {
		g = &c.server.gates[1]
	}
	switch m := message.(type) {
	case *wire.List, *wire.Show, *wire.Why, *wire.Events, *wire.Status, *wire.Jobs, *wire.RetryJobs,
		*wire.Invalidate, *wire.Pin, *wire.Unpin, *wire.Export:
		return g.pages
	case *wire.Collect, *wire.Remove, *wire.Doctor:
		return g.surveys
	case *wire.Usage:
		if m.GetAfter() != "" {
			return g.pages
		}
		return g.surveys
	case *wire.Check, *wire.Pack, *wire.Import, *wire.Push, *wire.CheckRemote,
		*wire.RemoteTrust, *wire.CollectRemote:
		return g.works
	}
	return nil
}
