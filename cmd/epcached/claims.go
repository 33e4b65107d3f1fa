package main

import (
	"context"
	"os"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Put takes what the holder of a claim compiled.
func (b *backend) Put(context.Context, unixsock.Peer, *wire.Put, []*os.File, func(*wire.Progress)) (unixsock.Answer, error) {
	return unixsock.Answer{}, errNotYet
}

// GiveUp ends a claim without a result.
func (b *backend) GiveUp(context.Context, unixsock.Peer, *wire.GiveUp) (*wire.GiveUpReply, error) {
	return nil, errNotYet
}
