package main

import (
	"context"
	"time"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Jobs lists compiles and failures.
func (b *backend) Jobs(ctx context.Context, p unixsock.Peer, _ *wire.Jobs) (*wire.JobsReply, error) {
	jobs, err := b.cache.Jobs(ctx, peer(p))
	if err != nil {
		return nil, err
	}
	failed, err := b.cache.Failures(ctx, peer(p))
	if err != nil {
		return nil, err
	}
	return cache.JobsReply(jobs, failed), nil
}

// Follow waits for a job's end.
func (b *backend) Follow(ctx context.Context, p unixsock.Peer, w *wire.Follow, progress func(*wire.Progress)) (*wire.JobsReply, error) {
	start := time.Now()
	job, err := b.cache.Follow(ctx, peer(p), w.Job, func(pr cache.Progress) { progress(pr.Reply(time.Since(start))) })
	if err != nil {
		return nil, err
	}
	return cache.JobsReply([]cache.Job{job}, nil), nil
}

// CancelJobs ends compiles.
func (b *backend) CancelJobs(ctx context.Context, p unixsock.Peer, w *wire.CancelJobs) (*wire.JobsReply, error) {
	jobs, err := b.cache.CancelJobs(ctx, peer(p), w.Jobs, w.All)
	if err != nil {
		return nil, err
	}
	return cache.JobsReply(jobs, nil), nil
}

// howFar passes on how far a request is; the socket fills in since when.
func howFar(progress func(*wire.Progress)) func(cache.Progress) {
	return func(p cache.Progress) { progress(p.Reply(0)) }
}
