package main

import (
	"context"
	"os"
	"strings"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (b *standIn) Import(context.Context, unixsock.Peer, *wire.Import, *unixsock.Files,
	func(*wire.Progress)) (
	*wire.ImportReply, error) {
	return nil, b.err
}

func (b *standIn) Export(context.Context, unixsock.Peer, *wire.Export) (*wire.ExportReply,
	*os.File, error) {
	return nil, nil, b.err
}

func (b *standIn) Put(_ context.Context, _ unixsock.Peer, p *wire.Put, _ *unixsock.Files,
	_ func(*wire.Progress)) (unixsock.Answer, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.put != nil {
		return b.put(p)
	}
	return b.hit()
}

func (b *standIn) GiveUp(_ context.Context, _ unixsock.Peer, g *wire.GiveUp) (*wire.GiveUpReply,
	error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changes = append(b.changes, "give up "+g.GetClaim()+": "+g.GetText())
	return &wire.GiveUpReply{}, b.err
}

func (b *standIn) Jobs(context.Context, unixsock.Peer, *wire.Jobs) (*wire.JobsReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.JobsReply{Jobs: b.jobs, Failures: b.failures}, b.err
}

func (b *standIn) Follow(_ context.Context, _ unixsock.Peer, f *wire.Follow,
	progress func(*wire.Progress)) (*wire.JobsReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changes = append(b.changes, "follow "+f.GetJob())
	for _, j := range b.jobs {
		if j.GetId() == f.GetJob() {
			progress(&wire.Progress{Phase: "compiling", ElapsedMs: 1500, EstimateMs: 3000,
				Job: j.GetId(), Waiting: j.GetWaiting()})
			return &wire.JobsReply{Jobs: []*wire.Job{j}}, b.err
		}
	}
	return nil, &unixsock.Error{Class: wire.ErrorClass_NOT_FOUND, Text: "no such job"}
}

func (b *standIn) CancelJobs(_ context.Context, _ unixsock.Peer,
	r *wire.CancelJobs) (*wire.JobsReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changes = append(b.changes, "cancel "+namedOrAll(r.GetJobs(), r.GetAll()))
	return &wire.JobsReply{Jobs: b.jobs}, b.err
}

// Stop answers as the test says.
func (b *standIn) Stop(context.Context, unixsock.Peer) (*os.File, error) {
	return b.stop()
}

func (b *standIn) RetryJobs(_ context.Context, _ unixsock.Peer, r *wire.RetryJobs) (*wire.JobsReply,
	error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changes = append(b.changes, "retry "+namedOrAll(r.GetEntries(), r.GetAll()))
	return &wire.JobsReply{Failures: b.failures}, b.err
}

// queue has every request answered with a job, as long as the model has none that is done.
func (b *standIn) queue() {
	b.acquire = func(a *wire.Acquire) (unixsock.Answer, error) {
		name := a.GetModel().GetName()
		for _, j := range b.jobs {
			if j.GetModelName() == name && j.GetState() != "done" {
				return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "background",
					Job: j.GetId(), Ep: j.GetEp()}}, nil
			}
		}
		return b.hit()
	}
}

func namedOrAll(names []string, all bool) string {
	if all {
		return "all"
	}
	return strings.Join(names, " ")
}
