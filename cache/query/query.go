// Package query answers the questions that change nothing: which builds there are, how they are
// kept, what they take and share, and what happened. It fills the messages that clients receive.
package query

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// Options are what queries read.
type Options struct {
	Dir      string // the state directory
	UID      uint32 // of the daemon
	Started  time.Time
	Remade   string // why the daemon opened the store again; "": it did not
	Now      func() time.Time
	Store    *store.Store
	Stream   *Stream // of the store's events
	Rights   *rights.Rights
	Runtimes *runtimes.Set

	Configured func() *Configured                                                      // what of the configuration is not in force
	Sandbox    func(context.Context) ([]compilers.Measure, error)                      // what confines the workers
	Jobs       func() int                                                              // that wait or run
	Rebuilds   func() map[index.BuildID]bool                                           // builds to be compiled again that wait for their source
	Try        func(context.Context, *runtimes.Runtime, *runtimes.Facts, string) error // compiles and loads a tiny model with an EP; returns what is wrong
	Owner      func(uid uint32) uint32                                                 // the user that a uid of a container belongs to
	Failures   func(rights.Peer) []failure.Failure
	PlanAgain  func(context.Context, rights.Peer, []index.Build) (*Question, error) // the request that an entry's builds answer

	Judge func(*wire.Build, *index.Build) // fills in what the build is good for, and what it gains
}

// Queries answers by the records of one store. Its methods may be called by several goroutines.
type Queries struct {
	options Options
	rights  *rights.Rights
	store   *store.Store
	index   *index.Index
	blobs   *cas.Store
	forms   *packing.Store
	usages  usages

	explaining explaining
	searches   chan struct{} // one token for each search for neighbours
}

// New returns queries of what the options name.
func New(o Options) *Queries {
	return &Queries{options: o, rights: o.Rights, store: o.Store, index: o.Store.Index(),
		blobs: o.Store.Blobs(), forms: o.Store.Forms(),
		searches:   make(chan struct{}, maxSearches),
		explaining: explaining{slots: make(keyed.Slots, maxExplaining)}}
}

// Error returns what a client is told of an error of the index or of a file.
func Error(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return apierr.New(apierr.Cancelled, ctx.Err(), "search")
	}
	return apierr.New(apierr.Internal, err, "search")
}

var errStop = errors.New("enough") // ends a walk through the index early
