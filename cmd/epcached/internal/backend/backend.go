// Package backend translates between the socket's requests and the cache. It makes no decisions.
package backend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Backend answers the socket's requests with the cache.
type Backend struct {
	Cache  *cache.Cache
	Server *unixsock.Server
	Socket string

	Version   string         // of the daemon
	StartedBy string         // as in wire.StatusReply
	End       func(*os.File) // ends the daemon, and keeps the file open until the process has ended

	owners rights.Owners

	gates gates
}

// New returns a backend. The caller sets its exported fields.
func New() *Backend {
	b := new(Backend)
	b.gates = newGates(func() bool { return b.Server.Crowded() })
	return b
}

func peer(p unixsock.Peer) request.Peer { return request.Peer{UID: p.UID, GID: p.GID, PID: p.PID} }

// Hello returns the client's scope.
func (b *Backend) Hello(p unixsock.Peer, _ *wire.Hello) *wire.HelloReply {
	reply := &wire.HelloReply{Scope: rights.OwnScope(peer(p))}
	if b.Administrator(p) {
		reply.Rights = append(reply.Rights, "administrator")
	}
	if b.Cache.Rights.IsPublisher(peer(p)) {
		reply.Rights = append(reply.Rights, "publisher")
	}
	return reply
}

// Acquire translates the request, and the answer back.
func (b *Backend) Acquire(ctx context.Context, p unixsock.Peer, w *wire.Acquire,
	files *unixsock.Files, progress func(*wire.Progress)) (unixsock.Answer, error) {
	start, report := time.Now(), func(pr request.Progress) { progress(pr.Reply()) }
	var repetition string
	if !p.Slow {
		repetition = b.Cache.Repeats.Key(peer(p), files.Body(), files.Descriptors())
		if a := b.Cache.Repeats.Answer(ctx, peer(p), repetition, report); a != nil {
			return answered(a, start), nil
		}
	}
	fds, remove, err := b.open(ctx, p, files, readDescriptors(w))
	defer remove()
	if err != nil {
		return unixsock.Answer{}, err
	}
	r, err := request.FromWire(peer(p), w, fds)
	if err != nil {
		return unixsock.Answer{}, err
	}
	r.Connection, r.Repetition = p.Connection, repetition
	a, err := b.Cache.Acquire(b.withReadGate(ctx, p), r, report)
	return answered(a, start), err
}

// answered translates an answer, nil for none, to a request that arrived at start.
func answered(a *request.Answer, start time.Time) unixsock.Answer {
	if a == nil {
		return unixsock.Answer{}
	}
	reply := a.Reply()
	reply.ElapsedSeconds = time.Since(start).Seconds()
	return unixsock.Answer{Reply: reply, View: a.View}
}

// open opens the files of a request. If one of them may never answer, it opens copies of those that
// are read, which remove removes.
func (b *Backend) open(ctx context.Context, p unixsock.Peer, files *unixsock.Files,
	read func(fd int) bool) (fds []*os.File, remove func(), err error) {
	if !p.Slow {
		return files.Open(), func() {}, nil
	}
	return b.Cache.Workspaces.CopySlowFiles(ctx, p.UID, files.Open(), read)
}

func allDescriptors(int) bool { return true }

// readDescriptors returns the descriptors of a request with files that the daemon reads at once.
// Libraries are not among them, because they are identified by their stamps or read later.
func readDescriptors(w *wire.Acquire) func(fd int) bool {
	named := make(map[uint32]bool)
	for _, m := range append([]*wire.Model{w.GetModel()}, w.GetGroup()...) {
		named[m.GetFd()] = true
		for _, x := range m.GetExternal() {
			named[x.GetFd()] = true
		}
	}
	for _, ep := range w.GetEps() {
		for _, fd := range ep.GetOptionFds() {
			named[fd] = true
		}
	}
	return func(fd int) bool { return named[uint32(fd)] }
}

// Put stores files that were compiled under a claim. The socket has checked their descriptors.
func (b *Backend) Put(ctx context.Context, p unixsock.Peer, w *wire.Put, files *unixsock.Files,
	progress func(*wire.Progress)) (unixsock.Answer, error) {
	start := time.Now()
	fds, remove, err := b.open(ctx, p, files, allDescriptors)
	defer remove()
	if err != nil {
		return unixsock.Answer{}, err
	}
	put := &claims.Put{Claim: w.Claim, Graphs: int(w.Graphs), CompileSeconds: w.CompileSeconds,
		ORTVersion: w.OrtVersion}
	for _, f := range w.Files {
		if int64(f.Fd) >= int64(len(fds)) {
			return unixsock.Answer{}, badRequest("submitted build: a file has no descriptor")
		}
		put.Files = append(put.Files, claims.PutFile{Name: f.Name, File: fds[f.Fd]})
	}
	for _, m := range w.MadeBy {
		put.MadeBy = append(put.MadeBy, claims.MadeBy{EP: m.Ep, Version: m.Version})
	}
	a, err := b.Cache.Claims.Put(b.withReadGate(ctx, p), peer(p), put, func(pr request.Progress) {
		progress(pr.Reply())
	})
	return answered(a, start), err
}

// Import stores a build of another machine, or without files returns the outcome that it would
// have.
func (b *Backend) Import(ctx context.Context, p unixsock.Peer, w *wire.Import,
	files *unixsock.Files, progress func(*wire.Progress)) (*wire.ImportReply, error) {
	fds, remove, err := b.open(ctx, p, files, allDescriptors)
	defer remove()
	if err != nil {
		return nil, err
	}
	im := &claims.Import{Card: w.Card, Keys: w.Keys, Store: w.Store, Check: w.Check,
		Documents: w.Trust}
	for _, f := range w.Files {
		if int64(f.Fd) >= int64(len(fds)) {
			return nil, badRequest("import: a file has no descriptor")
		}
		im.Files = append(im.Files, claims.PutFile{Name: f.Name, File: fds[f.Fd]})
	}
	out, err := b.Cache.Claims.Import(b.withReadGate(ctx, p), peer(p), im,
		func(pr request.Progress) { progress(pr.Reply()) })
	if err != nil {
		return nil, err
	}
	return out.Reply(), nil
}

// Export returns the description of a build, and its view.
func (b *Backend) Export(ctx context.Context, p unixsock.Peer, w *wire.Export) (
	*wire.ExportReply, *os.File, error) {
	return b.Cache.Queries.Export(ctx, peer(p), w.Build)
}

// Owner returns the user that a uid counts as.
func (b *Backend) Owner(uid uint32) uint32 { return b.owners.OwnerOf(uid) }

// Administrator reports whether the peer may see and change all builds.
func (b *Backend) Administrator(p unixsock.Peer) bool {
	return b.Cache.Rights.IsAdministrator(peer(p))
}

// Stop ends the daemon for its own user and administrators.
func (b *Backend) Stop(_ context.Context, p unixsock.Peer) (*os.File, error) {
	if !b.Administrator(p) {
		return nil, apierr.New(apierr.NotAllowed, nil,
			"only uid %d and administrators may stop this daemon", os.Geteuid()).
			WithHint("run it as that user, or add this user to administrators in the daemon's " +
				"configuration")
	}
	ends, end, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("stop: %w", err)
	}
	b.End(end)
	return ends, nil
}

// Subscribe calls send with events as they happen.
func (b *Backend) Subscribe(ctx context.Context, p unixsock.Peer, _ *wire.Subscribe,
	send func(*wire.Event) error) error {
	return b.Cache.Queries.Subscribe(ctx, peer(p), 0, send)
}

// WireError gives the cache's errors their class on the wire; the numbers are the same on purpose.
func WireError(err error) error {
	if need, is := errors.AsType[*identity.NeedFilesError](err); is {
		out := &unixsock.NeedError{Locations: need.Locations}
		for _, i := range need.Members {
			out.Members = append(out.Members, uint32(i))
		}
		return out
	}
	if e, is := errors.AsType[*apierr.Error](err); is {
		return &unixsock.Error{Class: wire.ErrorClass(e.Class), Text: e.Text, Hint: e.Hint,
			Facts: e.Facts, Err: err}
	}
	return err
}
