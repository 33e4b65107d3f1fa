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
	a, err := b.cache.Acquire(ctx, r, func(pr cache.Progress) { progress(progressReply(&pr, time.Since(start))) })
	if err != nil {
		return unixsock.Answer{}, err
	}
	reply := acquireReply(a)
	reply.ElapsedSeconds = time.Since(start).Seconds()
	return unixsock.Answer{Reply: reply, View: a.View}, nil
}

// Release needs no work: the lease is the descriptor.
func (b *backend) Release(context.Context, unixsock.Peer, *wire.Release) (*wire.ReleaseReply, error) {
	return &wire.ReleaseReply{}, nil
}

// List pages.
func (b *backend) List(ctx context.Context, p unixsock.Peer, w *wire.List, progress func(*wire.Progress)) (*wire.ListReply, error) {
	filter := cache.ListFilter{Model: w.Model, EP: w.Ep, After: w.After, Limit: int(w.Limit), Progress: howFar(progress)}
	page, next, err := b.cache.List(ctx, peer(p), filter)
	if err != nil {
		return nil, err
	}
	reply := &wire.ListReply{Next: next}
	var cut int
	if reply.Builds, cut = buildsReply(page, maxReply); cut > 0 {
		reply.Next = page[len(page)-cut-1].Build.ID.String()
	}
	return reply, nil
}

// Show gives everything about the builds that a name means.
func (b *backend) Show(ctx context.Context, p unixsock.Peer, w *wire.Show) (*wire.ShowReply, error) {
	builds, history, err := b.cache.Show(ctx, peer(p), w.Entry)
	if err != nil {
		return nil, err
	}
	return showReply(builds, history, maxReply), nil
}

// Invalidate withholds.
func (b *backend) Invalidate(ctx context.Context, p unixsock.Peer, w *wire.Invalidate) (*wire.ChangeReply, error) {
	builds, err := b.cache.Invalidate(ctx, peer(p), w.Entries, w.Reason, w.DryRun)
	if err != nil {
		return nil, err
	}
	return changeReply(&builds, 0, maxReply), nil
}

// Remove deletes.
func (b *backend) Remove(ctx context.Context, p unixsock.Peer, w *wire.Remove) (*wire.ChangeReply, error) {
	if w.All == (len(w.Entries) > 0) {
		return nil, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: "remove: name entries, or say all"}
	}
	builds, freed, err := b.cache.Remove(ctx, peer(p), w.Entries, w.All, w.DryRun)
	if err != nil {
		return nil, err
	}
	return changeReply(&builds, freed, maxReply), nil
}

// Check looks for damage.
func (b *backend) Check(ctx context.Context, p unixsock.Peer, w *wire.Check, progress func(*wire.Progress)) (*wire.CheckReply, error) {
	if w.Space {
		return b.checkSpace(ctx, p, progress)
	}
	result, err := b.cache.Check(ctx, peer(p), w.Deep, w.Repair, howFar(progress))
	if err != nil {
		return nil, err
	}
	return checkReply(&result, maxReply), nil
}

// Status counts, for the cache and for the socket.
func (b *backend) Status(ctx context.Context, p unixsock.Peer, _ *wire.Status) (*wire.StatusReply, error) {
	s, err := b.cache.Status(ctx)
	if err != nil {
		return nil, err
	}
	reply := &wire.StatusReply{
		Version: version, Pid: int64(os.Getpid()), UptimeSeconds: time.Since(s.Started).Seconds(),
		StateDirectory: b.cache.Directory(), Socket: b.socket,
		Hits: s.Counters["hits"], Misses: s.Counters["misses"], Compiles: s.Counters["compiles"], Failures: s.Counters["failures"],
		CompileSecondsSaved: s.SavedSeconds, Warnings: s.Warnings, Jobs: uint32(s.Jobs),
		Connections: uint32(b.server.Connections()),
		Space:       spaceReply(&s.Space), StartedBy: b.startedBy,
	}
	for i := range s.Runtimes {
		reply.Runtimes = append(reply.Runtimes, runtimeReply(&s.Runtimes[i]))
	}
	reply.Sourceless = &wire.Sourceless{Builds: uint64(s.Sourceless.Builds),
		Looked: uint64(s.Sourceless.Looked)}
	for _, why := range s.Sourceless.Reasons() {
		reply.Sourceless.Why = append(reply.Sourceless.Why, &wire.Sourceless_Why{Text: why,
			Builds: uint64(s.Sourceless.Why[why])})
	}
	reply.Sandbox = b.sandbox(ctx)
	return reply, nil
}

// sandbox tells what keeps workers from doing harm, in lines.
func (b *backend) sandbox(ctx context.Context) []string {
	measures, err := b.cache.Sandbox(ctx)
	if err != nil {
		return []string{valid("NOT KNOWN: " + err.Error())}
	}
	var lines []string
	for _, m := range measures {
		lines = append(lines, valid(m.String()))
	}
	return lines
}

// Probe tells what this machine has.
func (b *backend) Probe(ctx context.Context, p unixsock.Peer, w *wire.Probe) (*wire.ProbeReply, error) {
	facts, err := b.cache.Probe(ctx, peer(p), runtimeRef(w.Runtime, nil), w.Refresh)
	if err != nil {
		return nil, err
	}
	reply := &wire.ProbeReply{Sandbox: b.sandbox(ctx)}
	for i := range facts {
		reply.Runtimes = append(reply.Runtimes, runtimeReply(&facts[i]))
	}
	return reply, nil
}

// Report passes on what a client says of a build.
func (b *backend) Report(ctx context.Context, p unixsock.Peer, w *wire.Report) (*wire.ReportReply, error) {
	d, err := b.cache.Report(ctx, peer(p), cache.Report{Build: w.Build, Code: w.Code, Text: w.Text, ORTVersion: w.OrtVersion,
		Graph: w.Graph, Runtime: runtimeRef(w.Runtime, nil)})
	if err != nil {
		return nil, err
	}
	return &wire.ReportReply{Decision: d.Decision, Text: valid(d.Text), Hint: valid(d.Hint), Class: d.Class, State: d.State}, nil
}

// Stop ends the daemon for its own user and administrators.
func (b *backend) Stop(_ context.Context, p unixsock.Peer) (*os.File, error) {
	if !b.cache.Administrator(peer(p)) {
		return nil, wireError(refusal.New(refusal.NotAllowed, nil, "the daemon of uid %d may be stopped by that user and by administrators", os.Geteuid()).
			WithHint("run it as that user, or have administrators in the daemon's configuration name this one"))
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
	advice, err := b.cache.Doctor(ctx, peer(p))
	if err != nil {
		return nil, err
	}
	reply := &wire.DoctorReply{}
	for _, a := range advice {
		reply.Advice = append(reply.Advice, &wire.Advice{Severity: a.Severity, Subject: valid(a.Subject), Text: valid(a.Text), Hint: valid(a.Hint)})
	}
	return reply, nil
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
