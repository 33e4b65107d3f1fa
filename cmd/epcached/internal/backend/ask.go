package backend

import (
	"context"
	"fmt"
	"os"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/joblist"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Ask passes on the requests that carry no descriptors, and reports their progress.
func (b *Backend) Ask(ctx context.Context, p unixsock.Peer, message proto.Message,
	progress func(*wire.Progress)) (proto.Message, error) {
	c, q := b.Cache, peer(p)
	ctx = b.withReadGate(ctx, p)
	far := func(pr request.Progress) { progress(pr.Reply()) }
	switch w := message.(type) {
	case *wire.Release:
		// nothing to do, because the lease ends with the descriptor
		return &wire.ReleaseReply{}, nil
	case *wire.List:
		return c.Queries.List(ctx, q, w, progress)
	case *wire.Show:
		return c.Queries.Show(ctx, q, w.Entry)
	case *wire.Why:
		return c.Queries.Why(ctx, q, w.Entry)
	case *wire.Invalidate:
		return c.Invalidate(ctx, q, w.Entries, w.Reason, w.DryRun)
	case *wire.Remove:
		if w.All == (len(w.Entries) > 0) {
			return nil, badRequest("remove: name entries, or set all")
		}
		return c.Remove(ctx, q, w.Entries, w.All, w.DryRun)
	case *wire.Pin:
		return c.Pin(ctx, q, w.Entries, w.DryRun)
	case *wire.Unpin:
		return c.Unpin(ctx, q, w.Entries, w.DryRun)
	case *wire.Collect:
		return b.collect(ctx, q, w, progress)
	case *wire.Pack:
		do, phase := c.Pack, "packing"
		if w.Unpack {
			do, phase = c.Unpack, "unpacking"
		}
		return do(ctx, q, w.Entries, w.All, w.DryRun, func(done, total int64) {
			progress(&wire.Progress{Phase: phase, Done: uint64(done), Total: uint64(total),
				Detail: fmt.Sprintf("build %d of %d", done+1, total)})
		})
	case *wire.Usage:
		return c.Queries.Usage(ctx, q, w, progress)
	case *wire.Push:
		return c.Push(ctx, q, w, far)
	case *wire.RemoteTrust:
		return c.RemoteTrust(ctx, q, w)
	case *wire.CollectRemote:
		return c.CollectRemote(ctx, q, w, far)
	case *wire.CheckRemote:
		return c.CheckRemote(ctx, q, w.Remote)
	case *wire.Status:
		return b.status(ctx, q)
	case *wire.Probe:
		return c.Queries.Probe(ctx, q, request.RuntimeOf(w.Runtime, nil), w.Refresh)
	case *wire.Check:
		return c.Check(ctx, q, w, progress)
	case *wire.Doctor:
		return c.Queries.Doctor().Examine(ctx, q)
	case *wire.Report:
		return c.Report(ctx, q, reports.Report{Build: w.Build, Code: w.Code, Text: w.Text,
			ORTVersion: w.OrtVersion, Graph: w.Graph}, request.RuntimeOf(w.Runtime, nil))
	case *wire.Events:
		var since time.Time
		if w.SinceMs > 0 {
			since = time.UnixMilli(w.SinceMs)
		}
		return c.Queries.Events(ctx, q, since, int(w.Limit))
	case *wire.Jobs:
		return b.jobs(ctx, q)
	case *wire.Follow:
		job, err := c.JobList.Follow(ctx, q, w.Job, far)
		return jobsReply(err, job)
	case *wire.CancelJobs:
		jobs, err := c.JobList.Cancel(ctx, q, w.Jobs, w.All)
		return jobsReply(err, jobs...)
	case *wire.RetryJobs:
		gone, err := c.JobList.Retry(ctx, q, w.Entries, w.All)
		if err != nil {
			return nil, err
		}
		return joblist.Reply(nil, gone), nil
	case *wire.GiveUp:
		return &wire.GiveUpReply{}, c.Claims.GiveUp(q, w.Claim, w.Text, w.Code)
	}
	return nil, nil
}

func badRequest(format string, args ...any) error {
	return &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: fmt.Sprintf(format, args...)}
}

func (b *Backend) status(ctx context.Context, p request.Peer) (*wire.StatusReply, error) {
	s, err := b.Cache.Queries.Status(ctx, p)
	if err != nil {
		return nil, err
	}
	if b.Cache.Rights.IsAdministrator(p) {
		s.Connections = uint32(b.Server.Connections())
	} else {
		own, err := b.Cache.JobList.Visible(ctx, p)
		if err != nil {
			return nil, err
		}
		s.Jobs = uint32(len(own))
	}
	s.Remotes = b.Cache.RemoteStatus()
	s.Version, s.Pid, s.Socket, s.StartedBy = b.Version, int64(os.Getpid()), b.Socket, b.StartedBy
	return s, nil
}

func (b *Backend) collect(ctx context.Context, p request.Peer, w *wire.Collect,
	progress func(*wire.Progress)) (*wire.CollectReply, error) {
	if w.ToBytes != nil && w.GetToBytes() < 0 {
		return nil, badRequest("collect: to_bytes %d: must not be negative", w.GetToBytes())
	}
	plan, err := b.Cache.PlanCollection(ctx, p, store.Goal{Bytes: w.ToBytes}, progress)
	if err == nil && !w.DryRun {
		err = b.Cache.Store.Collector().Collect(ctx, plan, func(done, total int64) {
			progress(&wire.Progress{Phase: "collecting", DoneBytes: done, TotalBytes: total})
		})
	}
	if err != nil {
		return nil, err
	}
	return b.Cache.CollectReply(plan), nil
}

func (b *Backend) jobs(ctx context.Context, p request.Peer) (*wire.JobsReply, error) {
	jobs, err := b.Cache.JobList.Visible(ctx, p)
	if err != nil {
		return nil, err
	}
	failed, err := b.Cache.JobList.Failures(ctx, p)
	if err != nil {
		return nil, err
	}
	return joblist.Reply(jobs, failed), nil
}

func jobsReply(err error, list ...jobs.Info) (*wire.JobsReply, error) {
	if err != nil {
		return nil, err
	}
	return joblist.Reply(list, nil), nil
}
