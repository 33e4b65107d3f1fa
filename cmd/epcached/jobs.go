package main

import (
	"context"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// errNotYet answers the requests that this version knows and does not serve.
var errNotYet = &unixsock.Error{Class: wire.ErrorClass_VERSION, Text: "not supported by this version"}

// Jobs lists compiles and failures.
func (b *backend) Jobs(context.Context, unixsock.Peer, *wire.Jobs) (*wire.JobsReply, error) {
	return nil, errNotYet
}

// Follow waits for a job's end.
func (b *backend) Follow(context.Context, unixsock.Peer, *wire.Follow, func(*wire.Progress)) (*wire.JobsReply, error) {
	return nil, errNotYet
}

// CancelJobs ends compiles.
func (b *backend) CancelJobs(_ context.Context, _ unixsock.Peer, w *wire.CancelJobs) (*wire.JobsReply, error) {
	if w.All == (len(w.Jobs) > 0) {
		return nil, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: "cancel: name jobs, or say all"}
	}
	return nil, errNotYet
}

// RetryJobs forgets failures.
func (b *backend) RetryJobs(_ context.Context, _ unixsock.Peer, w *wire.RetryJobs) (*wire.JobsReply, error) {
	if w.All == (len(w.Entries) > 0) {
		return nil, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: "retry: name entries, or say all"}
	}
	return nil, errNotYet
}
