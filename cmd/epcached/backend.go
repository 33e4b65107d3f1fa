package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// backend answers the socket's requests with the cache: it translates between the two, and decides nothing.
type backend struct {
	cache  *cache.Cache
	server *unixsock.Server
	socket string

	startedBy string         // as in wire.StatusReply
	stop      func(*os.File) // ends the daemon, and keeps the file open until the process has ended
}

func peer(p unixsock.Peer) cache.Peer { return cache.Peer{UID: p.UID, GID: p.GID, PID: p.PID} }

// Hello tells the client who it is here.
func (b *backend) Hello(p unixsock.Peer, _ *wire.Hello) *wire.HelloReply {
	reply := &wire.HelloReply{Scope: cache.OwnScope(peer(p))}
	if b.cache.Administrator(peer(p)) {
		reply.Rights = append(reply.Rights, "administrator")
	}
	if b.cache.Publisher(peer(p)) {
		reply.Rights = append(reply.Rights, "publisher")
	}
	return reply
}

var onMiss = map[wire.OnMiss]cache.OnMiss{
	wire.OnMiss_WAIT: cache.Wait, wire.OnMiss_FAIL: cache.Fail, wire.OnMiss_REFRESH: cache.Refresh,
	wire.OnMiss_BYPASS: cache.Bypass, wire.OnMiss_KEY_ONLY: cache.KeyOnly, wire.OnMiss_EXPLAIN: cache.Explain,
	wire.OnMiss_BACKGROUND: cache.Background, wire.OnMiss_CLAIM: cache.ForClaim,
}

// Acquire translates the request, and the answer back.
func (b *backend) Acquire(ctx context.Context, p unixsock.Peer, w *wire.Acquire, fds []*os.File, progress func(*wire.Progress)) (unixsock.Answer, error) {
	start := time.Now()
	if w.DeadlineMs > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(w.DeadlineMs)*time.Millisecond)
		defer cancel()
	}
	r, err := acquireRequest(peer(p), w, fds)
	if err != nil {
		return unixsock.Answer{}, err
	}
	r.Connection = p.Connection
	a, err := b.cache.Acquire(ctx, r, func(pr cache.Progress) { progress(pr.Reply(time.Since(start))) })
	if err != nil {
		return unixsock.Answer{}, err
	}
	reply := a.Reply()
	reply.ElapsedSeconds = time.Since(start).Seconds()
	return unixsock.Answer{Reply: reply, View: a.View}, nil
}

// Release needs no work: the lease is the descriptor.
func (b *backend) Release(context.Context, unixsock.Peer, *wire.Release) (*wire.ReleaseReply, error) {
	return &wire.ReleaseReply{}, nil
}

// List pages.
func (b *backend) List(ctx context.Context, p unixsock.Peer, w *wire.List, progress func(*wire.Progress)) (*wire.ListReply, error) {
	return b.cache.List(ctx, peer(p), w, howFar(progress))
}

// Show gives everything about the builds that a name means.
func (b *backend) Show(ctx context.Context, p unixsock.Peer, w *wire.Show) (*wire.ShowReply, error) {
	return b.cache.Show(ctx, peer(p), w.Entry)
}

// Invalidate withholds.
func (b *backend) Invalidate(ctx context.Context, p unixsock.Peer, w *wire.Invalidate) (*wire.ChangeReply, error) {
	return b.cache.Invalidate(ctx, peer(p), w.Entries, w.Reason, w.DryRun)
}

// Remove deletes.
func (b *backend) Remove(ctx context.Context, p unixsock.Peer, w *wire.Remove) (*wire.ChangeReply, error) {
	if w.All == (len(w.Entries) > 0) {
		return nil, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: "remove: name entries, or say all"}
	}
	return b.cache.Remove(ctx, peer(p), w.Entries, w.All, w.DryRun)
}

// Check looks for damage.
func (b *backend) Check(ctx context.Context, p unixsock.Peer, w *wire.Check, progress func(*wire.Progress)) (*wire.CheckReply, error) {
	if w.Space {
		return b.cache.CheckSpace(ctx, peer(p), howFar(progress))
	}
	return b.cache.Check(ctx, peer(p), w.Deep, w.Repair, howFar(progress))
}

// Status adds to the cache's own what the process and the socket are.
func (b *backend) Status(ctx context.Context, p unixsock.Peer, _ *wire.Status) (*wire.StatusReply, error) {
	s, err := b.cache.Status(ctx)
	if err != nil {
		return nil, err
	}
	s.Version, s.Pid, s.Socket, s.StartedBy = version, int64(os.Getpid()), b.socket, b.startedBy
	s.Connections = uint32(b.server.Connections())
	return s, nil
}

// Probe tells what this machine has.
func (b *backend) Probe(ctx context.Context, p unixsock.Peer, w *wire.Probe) (*wire.ProbeReply, error) {
	return b.cache.Probe(ctx, peer(p), runtimeRef(w.Runtime, nil), w.Refresh)
}

// Report passes on what a client says of a build.
func (b *backend) Report(ctx context.Context, p unixsock.Peer, w *wire.Report) (*wire.ReportReply, error) {
	return b.cache.Report(ctx, peer(p), cache.Report{Build: w.Build, Code: w.Code, Text: w.Text, ORTVersion: w.OrtVersion,
		Graph: w.Graph, Runtime: runtimeRef(w.Runtime, nil)})
}

// Stop ends the daemon for its own user and administrators.
func (b *backend) Stop(_ context.Context, p unixsock.Peer) (*os.File, error) {
	if !b.cache.Administrator(peer(p)) {
		return nil, refusal.New(refusal.NotAllowed, nil, "the daemon of uid %d may be stopped by that user and by administrators", os.Geteuid()).
			WithHint("run it as that user, or have administrators in the daemon's configuration name this one")
	}
	ends, end, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("stop: %w", err)
	}
	b.stop(end)
	return ends, nil
}

// Doctor gives advice.
func (b *backend) Doctor(ctx context.Context, p unixsock.Peer, _ *wire.Doctor) (*wire.DoctorReply, error) {
	return b.cache.Doctor(ctx, peer(p))
}

// Why explains an entry.
func (b *backend) Why(ctx context.Context, p unixsock.Peer, w *wire.Why) (*wire.Explanation, error) {
	return b.cache.Why(ctx, peer(p), w.Entry)
}

// wireError gives the cache's errors their class on the wire; the numbers are the same on purpose.
func wireError(err error) error {
	var need *cache.NeedFilesError
	if errors.As(err, &need) {
		out := &unixsock.NeedError{Locations: need.Locations}
		for _, i := range need.Members {
			out.Members = append(out.Members, uint32(i))
		}
		return out
	}
	var e *refusal.Error
	if errors.As(err, &e) {
		return &unixsock.Error{Class: wire.ErrorClass(e.Class), Text: e.Text, Hint: e.Hint, Facts: e.Facts, Err: err}
	}
	return err
}
