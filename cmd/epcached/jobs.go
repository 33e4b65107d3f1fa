package main

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/proto"

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
	return &wire.JobsReply{Jobs: jobsReply(jobs), Failures: failuresReply(failed, maxReply/2)}, nil
}

// Follow waits for a job's end.
func (b *backend) Follow(ctx context.Context, p unixsock.Peer, w *wire.Follow, progress func(*wire.Progress)) (*wire.JobsReply, error) {
	start := time.Now()
	job, err := b.cache.Follow(ctx, peer(p), w.Job, func(pr cache.Progress) { progress(progressReply(&pr, time.Since(start))) })
	if err != nil {
		return nil, err
	}
	return &wire.JobsReply{Jobs: jobsReply([]cache.Job{job})}, nil
}

// CancelJobs ends compiles.
func (b *backend) CancelJobs(ctx context.Context, p unixsock.Peer, w *wire.CancelJobs) (*wire.JobsReply, error) {
	jobs, err := b.cache.CancelJobs(ctx, peer(p), w.Jobs, w.All)
	if err != nil {
		return nil, err
	}
	return &wire.JobsReply{Jobs: jobsReply(jobs)}, nil
}

// jobsReply gives the first jobs, as many as fit.
func jobsReply(jobs []cache.Job) []*wire.Job {
	var out []*wire.Job
	size := 0
	for i := range jobs {
		one := jobReply(&jobs[i])
		if size += proto.Size(one) + 8; size > maxReply/2 { // 8: its tag and length, at most; the rest is for failures
			break
		}
		out = append(out, one)
	}
	return out
}

func jobReply(j *cache.Job) *wire.Job {
	out := &wire.Job{Id: j.ID, State: j.State, Phase: j.Phase, ModelName: valid(j.ModelName), ModelDigest: keyText(j.ModelDigest),
		RequestKey: keyText(j.RequestKey), Build: keyText(j.Build), Ep: j.EP, Uid: j.UID, Background: j.Background,
		Waiting: uint32(j.Waiting), QueuedMs: milliseconds(j.Queued), StartedMs: milliseconds(j.Started),
		ElapsedMs: j.Elapsed.Milliseconds(), EstimateMs: j.Estimate.Milliseconds(), Why: valid(j.Why), Models: uint32(j.Models)}
	var e *unixsock.Error
	if j.Err != nil && errors.As(wireError(j.Err), &e) {
		out.Error = &wire.Error{Class: e.Class, Text: valid(e.Text), Hint: valid(e.Hint), Facts: make(map[string]string, len(e.Facts))}
		for name, value := range e.Facts {
			out.Error.Facts[name] = valid(value)
		}
	} else if j.Err != nil {
		out.Error = &wire.Error{Class: wire.ErrorClass_INTERNAL, Text: "internal error"} // what it is stands in the log
	}
	return out
}

// howFar passes on how far a request is; the socket fills in since when.
func howFar(progress func(*wire.Progress)) func(cache.Progress) {
	return func(p cache.Progress) { progress(progressReply(&p, 0)) }
}

func progressReply(p *cache.Progress, elapsed time.Duration) *wire.Progress {
	return &wire.Progress{Phase: p.Phase, Detail: valid(p.Detail), DoneBytes: p.Done, TotalBytes: p.Total, ElapsedMs: elapsed.Milliseconds(),
		EstimateMs: p.Estimate.Milliseconds(), Job: p.Job, Waiting: uint32(p.Waiting), Done: p.Through, Total: p.Of}
}
