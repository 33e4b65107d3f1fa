package unixsock

import (
	"context"
	"errors"
	"os"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

func (c *connection) handle(r *request, message proto.Message) {
	defer c.handlers.Done()
	reply, view := c.perform(r, message)
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
		answer, err := withFiles(c, r, m, checkPut, c.server.Backend.Put)
		return c.build(r, answer, err)
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
	if err != nil && answer.View != nil {
		closeFiles([]*os.File{answer.View})
	}
	var need *NeedError
	switch {
	case err != nil && errors.As(c.server.Errors(err), &need):
		return &wire.Need{Locations: need.Locations, Members: need.Members}, nil
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

func withFiles[M any](c *connection, r *request, message M, check func(M, []int) error,
	ask func(context.Context, Peer, M, []*os.File, func(*wire.Progress)) (Answer, error)) (Answer, error) {
	if err := check(message, r.fds); err != nil {
		return Answer{}, err
	}
	files := toFiles(r.fds)
	r.fds = nil // the files own them now
	defer func() {
		closeFiles(files)
		c.user.descriptors.Add(-int64(len(files)))
	}()
	reporter := c.reporter(r)
	defer reporter.end()
	return ask(r.ctx, c.peer, message, files, reporter.report)
}

func (c *connection) reporter(r *request) *reporter {
	return &reporter{connection: c, number: r.number, arrived: r.arrived}
}

func (c *connection) ask(r *request, message proto.Message) (proto.Message, error) {
	switch m := message.(type) {
	case *wire.Report:
		m.Text = cut(m.GetText(), MaxReportText)
	case *wire.GiveUp:
		m.Text = cut(m.GetText(), MaxReportText)
	}
	reporter := c.reporter(r)
	defer reporter.end()
	reply, err := c.server.Backend.Ask(r.ctx, c.peer, message, reporter.report)
	if err == nil && reply == nil {
		err = refused("protocol: a message that is no request")
	}
	return reply, err
}

// failure logs what the client must not be told, and says the rest.
func (c *connection) failure(r *request, err error) *wire.Error {
	err = c.server.Errors(err)
	if refused := c.server.refused(); refused != nil {
		err = refused
	}
	if ClassOf(err) == wire.ErrorClass_INTERNAL {
		c.server.Log.Error("request", "uid", c.peer.UID, "pid", c.peer.PID, "number", r.number, "error", err)
	}
	return toWire(err)
}
