package unixsock

import (
	"cmp"
	"context"
	"errors"
	"os"
	"runtime"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

func (c *connection) handle(r *request, message proto.Message) {
	defer c.handlers.Done()
	reply, view := proto.Message(nil), (*os.File)(nil)
	if gate := c.gate(message); gate == nil {
		reply, view = c.perform(r, message)
	} else if leave, err := gate.Take(r.ctx, c.account); err != nil {
		reply = c.failure(r, &Error{Class: ClassOf(err), Text: "too many requests of this kind " +
			"are waiting", Err: err})
	} else {
		defer leave()
		reply, view = c.perform(r, message)
	}
	if err := c.answer(r, reply, view); err != nil && c.ctx.Err() == nil {
		c.server.Log.Info("answer", "uid", c.peer.UID, "pid", c.peer.PID, "error", err)
	}
}

func (c *connection) perform(r *request, message proto.Message) (proto.Message, *os.File) {
	switch m := message.(type) {
	case *wire.Subscribe:
		return c.failure(r, c.subscribe(r, m)), nil
	case *wire.Acquire:
		answer, err := withFiles(c, r, m, checkAcquire, c.server.Backend.Acquire)
		return c.build(r, answer, err)
	case *wire.Put:
		c.removeClaim(m.GetClaim())
		answer, err := withFiles(c, r, m, checkPut, c.server.Backend.Put)
		return c.build(r, answer, err)
	case *wire.Import:
		reply, err := withFiles(c, r, m, checkImport, c.server.Backend.Import)
		if err != nil {
			return c.failure(r, err), nil
		}
		return reply, nil
	case *wire.Export:
		reply, view, err := c.server.Backend.Export(r.ctx, c.peer, m)
		if err != nil {
			return c.failure(r, err), nil
		}
		reply.Fd = new(uint32)
		return reply, view
	case *wire.Stop:
		ends, err := c.server.Backend.Stop(r.ctx, c.peer)
		if err != nil {
			return c.failure(r, err), nil
		}
		return &wire.StopReply{}, ends
	}
	reply, err := c.ask(r, message)
	if err != nil {
		return c.failure(r, err), nil
	}
	return reply, nil
}

func (c *connection) build(r *request, answer Answer, err error) (proto.Message, *os.File) {
	if err != nil {
		if answer.View != nil {
			closeFiles([]*os.File{answer.View})
		}
		if need, is := errors.AsType[*NeedError](c.server.Errors(err)); is {
			return &wire.Need{Locations: need.Locations, Members: need.Members}, nil
		}
		return c.failure(r, err), nil
	}
	if answer.Reply == nil {
		answer.Reply = &wire.AcquireReply{}
	}
	if claim := answer.Reply.GetClaim(); claim != nil {
		c.addClaim(claim)
	}
	answer.Reply.Fd = nil
	if answer.View != nil {
		answer.Reply.Fd = new(uint32)
	}
	return answer.Reply, answer.View
}

func withFiles[M, A any](c *connection, r *request, message M,
	check func(M, []int) (slow bool, err error),
	ask func(context.Context, Peer, M, *Files, func(*wire.Progress)) (A, error)) (answer A,
	err error) {
	slow, err := check(message, r.fds)
	peer := c.peer
	if peer.Slow = slow; slow {
		c.countSlow(1)
		defer c.countSlow(-1)
		err = cmp.Or(err, c.tooSlow(1))
	}
	if err != nil {
		return answer, err
	}
	r.checked, r.slow = true, slow
	reporter := c.reporter(r)
	defer reporter.end()
	return ask(r.ctx, peer, message, &Files{r, c.server.overseer.expectSlow}, reporter.enqueue)
}

func (c *connection) reporter(r *request) *reporter {
	return &reporter{connection: c, number: r.number, arrived: r.arrived}
}

func (c *connection) ask(r *request, message proto.Message) (proto.Message, error) {
	switch m := message.(type) {
	case *wire.Report:
		m.Text = cut(m.GetText(), MaxReportText)
	case *wire.GiveUp:
		c.removeClaim(m.GetClaim())
		m.Text = cut(m.GetText(), MaxReportText)
	}
	reporter := c.reporter(r)
	defer reporter.end()
	reply, err := c.server.Backend.Ask(r.ctx, c.peer, message, reporter.enqueue)
	if err == nil && reply == nil {
		err = descriptorRefusal("protocol: a message that is not a request")
	}
	return reply, err
}

// failure logs the details that the client must not see, and returns the rest.
func (c *connection) failure(r *request, err error) *wire.Error {
	err = c.server.Errors(err)
	if refused := c.server.refused(); refused != nil {
		err = refused
	}
	if ended, class := r.ctx.Err(), ClassOf(err); ended != nil && class != ClassOf(ended) &&
		(class == wire.ErrorClass_INTERNAL || errors.Is(err, ended)) {
		err = &Error{Class: ClassOf(ended), Err: err} // the end of the context is the cause
	}
	if ClassOf(err) == wire.ErrorClass_INTERNAL {
		c.server.Log.Error("request", "uid", c.peer.UID, "pid", c.peer.PID, "number", r.number,
			"error", err)
	}
	return toWire(err)
}

// errNotReading ends a connection if its client leaves too many answers unread for too long.
var errNotReading = errors.New("the client does not read its answers")

// answer sends the answer of a request, and closes the view. After an error the connection is
// unusable.
func (c *connection) answer(r *request, reply proto.Message, view *os.File) error {
	c.finish(r)
	defer func() {
		c.discard(r) // after the answer, because closing may block
		c.inFlight.Add(-1)
		c.user.requestBytes.Add(-r.bytes)
	}()
	if view != nil {
		defer closeFiles([]*os.File{view})
	}
	envelope, fds := envelopeOf(r.number, reply), []int(nil)
	if view != nil {
		envelope.Descriptors, fds = 1, []int{int(view.Fd())}
	}
	err := c.send(c.ctx, envelope, fds)
	runtime.KeepAlive(view)
	if busy, is := errors.AsType[*Error](err); is { // the answer was not sent, but the error can be
		err = c.send(c.ctx, envelopeOf(r.number, toWire(busy)), nil)
	}
	if err != nil {
		c.cancel()
	}
	return err
}

// send writes one frame. After an error other than an *Error the connection is unusable.
func (c *connection) send(ctx context.Context, envelope *wire.Envelope, fds []int) error {
	frame, err := encode(envelope)
	if err != nil {
		c.server.Log.Error("answer", "error", err)
		e := &Error{Class: wire.ErrorClass_INTERNAL, Text: "the answer cannot be encoded",
			Hint: "the daemon's log says more"}
		if errors.Is(err, errTooLarge) {
			e.Text, e.Hint = "the answer "+err.Error(), "request less at a time"
		}
		return e
	}
	defer putBuffer(frame)
	if err := c.stream.lock(ctx); err != nil {
		return err
	}
	defer c.stream.unlock()
	if len(fds) == 0 {
		return c.stream.write(ctx, *frame, nil, c.server.limits.WriteTimeout)
	}
	return c.sendDescriptors(ctx, *frame, fds)
}

// sendDescriptors sends an answer with descriptors. It waits until the client has read enough
// earlier ones, because the kernel limits the unread descriptors of the whole daemon, and a client
// that does not read would starve all others.
func (c *connection) sendDescriptors(ctx context.Context, frame []byte, fds []int) error {
	end := time.Now().Add(c.server.limits.WriteTimeout)
	for {
		if err := c.awaitReading(ctx, end); err != nil {
			return err
		}
		c.unread.Add(1)
		c.user.unread.Add(1)
		err := c.stream.write(ctx, frame, fds, c.server.limits.WriteTimeout)
		// too many unread descriptors
		if !errors.Is(err, syscall.ETOOMANYREFS) {
			return err
		}
		c.unread.Add(-1)
		c.user.unread.Add(-1)
		if err := pauseUntil(ctx, maxDrainPoll, end); err != nil {
			return &Error{Class: wire.ErrorClass_BUSY, Text: "too many descriptors are being " +
				"sent to clients", Err: err}
		}
	}
}

func (c *connection) awaitReading(ctx context.Context, end time.Time) error {
	limits := &c.server.limits
	for poll := minDrainPoll; ; poll = min(2*poll, maxUnreadPoll) {
		own := c.unread.Load() >= int64(limits.Unread)
		if !own && c.user.unread.Load() < int64(limits.UnreadPerUID) {
			return nil
		}
		c.noteReadLocked()
		if !own {
			c.server.releaseRead(c.user)
		}
		if c.unread.Load() < int64(limits.Unread) &&
			c.user.unread.Load() < int64(limits.UnreadPerUID) {
			return nil
		}
		switch err := pauseUntil(ctx, poll, end); {
		case err == nil:
		case own || ctx.Err() != nil:
			return errors.Join(errNotReading, ctx.Err())
		default:
			return &Error{Class: wire.ErrorClass_BUSY, Text: "this user has too many unread " +
				"answers", Err: err}
		}
	}
}

func pauseUntil(ctx context.Context, pause time.Duration, end time.Time) error {
	if time.Now().After(end) {
		return os.ErrDeadlineExceeded
	}
	select {
	case <-time.After(pause):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// noteRead returns the client's credit for unread answers, if it has read all. A
// connection that is being written to is skipped, because the writer does the same.
func (c *connection) noteRead() {
	select {
	case c.stream.writing <- struct{}{}:
		c.noteReadLocked()
		c.stream.unlock()
	default:
	}
}

func (c *connection) noteReadLocked() {
	if c.unread.Load() > 0 && !c.stream.unread() {
		c.user.unread.Add(-c.unread.Swap(0))
	}
}

// closeAfterRead closes the connection after its answers with descriptors were read or the client
// has disconnected. Until then they count against its user, because otherwise a user could leave
// some unread with any number of connections.
func (c *connection) closeAfterRead() {
	poll := maxDrainPoll
	// Tells the client that no more data follow; sent data stay readable. An error means that it
	// has disconnected.
	_ = c.stream.conn.CloseWrite()
	_ = c.stream.conn.CloseRead()
	for {
		c.noteRead()
		if c.unread.Load() == 0 || pauseUntil(c.server.base, poll, time.Now().Add(poll)) != nil {
			break
		}
		poll = min(2*poll, time.Second)
	}
	c.user.unread.Add(-c.unread.Swap(0))
	// All data were sent or dropped by now.
	_ = c.stream.conn.Close()
}
