package unixsock

import (
	"context"
	"errors"
	"os"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// handle answers one request.
func (c *connection) handle(r *request, message proto.Message) {
	defer c.handlers.Done()
	reply, view := c.perform(r, message)
	if err := c.answer(r, reply, view); err != nil && c.ctx.Err() == nil {
		c.server.Log.Info("answer", "uid", c.peer.UID, "pid", c.peer.PID, "error", err)
	}
}

func (c *connection) perform(r *request, message proto.Message) (proto.Message, *os.File) {
	if subscribe, ok := message.(*wire.Subscribe); ok {
		return c.failure(r, c.subscribe(r, subscribe)), nil
	}
	acquire, ok := message.(*wire.Acquire)
	if !ok {
		reply, err := c.ask(r.ctx, message)
		if err != nil {
			return c.failure(r, err), nil
		}
		return reply, nil
	}
	answer, err := c.acquire(r, acquire)
	if err != nil && answer.View != nil {
		closeFiles([]*os.File{answer.View})
	}
	var need *NeedError
	switch {
	case errors.As(err, &need):
		return &wire.Need{Locations: need.Locations}, nil
	case err != nil:
		return c.failure(r, err), nil
	case answer.Reply == nil:
		answer.Reply = &wire.AcquireReply{}
	}
	answer.Reply.Fd = nil
	if answer.View != nil {
		answer.Reply.Fd = new(uint32)
	}
	return answer.Reply, answer.View
}

func (c *connection) acquire(r *request, message *wire.Acquire) (Answer, error) {
	if err := checkAcquire(message, r.fds); err != nil {
		return Answer{}, err
	}
	files := toFiles(r.fds)
	r.fds = nil // the files own them now
	defer func() {
		closeFiles(files)
		c.user.descriptors.Add(-int64(len(files)))
	}()
	reporter := &reporter{connection: c, number: r.number, arrived: r.arrived}
	defer reporter.end()
	return c.server.Backend.Acquire(r.ctx, c.peer, message, files, reporter.report)
}

func (c *connection) ask(ctx context.Context, message proto.Message) (proto.Message, error) {
	b := c.server.Backend
	switch m := message.(type) {
	case *wire.Release:
		return b.Release(ctx, c.peer, m)
	case *wire.List:
		return b.List(ctx, c.peer, m)
	case *wire.Show:
		return b.Show(ctx, c.peer, m)
	case *wire.Invalidate:
		return b.Invalidate(ctx, c.peer, m)
	case *wire.Remove:
		return b.Remove(ctx, c.peer, m)
	case *wire.Status:
		return b.Status(ctx, c.peer, m)
	case *wire.Probe:
		return b.Probe(ctx, c.peer, m)
	case *wire.Check:
		return b.Check(ctx, c.peer, m)
	case *wire.Report:
		m.Text = cut(m.GetText(), MaxReportText)
		return b.Report(ctx, c.peer, m)
	case *wire.Why:
		return b.Why(ctx, c.peer, m)
	case *wire.Events:
		return b.Events(ctx, c.peer, m)
	case *wire.Doctor:
		return b.Doctor(ctx, c.peer, m)
	}
	return nil, refused("protocol: a message that is no request")
}

// failure logs what the client must not be told, and says the rest.
func (c *connection) failure(r *request, err error) *wire.Error {
	if ClassOf(err) == wire.ErrorClass_INTERNAL {
		c.server.Log.Error("request", "uid", c.peer.UID, "pid", c.peer.PID, "number", r.number, "error", err)
	}
	return toWire(err)
}
