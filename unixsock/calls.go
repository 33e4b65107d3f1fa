package unixsock

import (
	"context"
	"errors"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// ask sends a request and waits; an Error frame becomes the error.
func (c *Client) ask(ctx context.Context, message proto.Message, fds []int,
	progress func(*wire.Progress)) (reply, error) {
	envelope, waiting := envelopeOf(0, message), newCall(progress != nil)
	if err := c.start(ctx, envelope, fds, waiting); err != nil {
		return reply{}, err
	}
	answer, err := c.wait(ctx, envelope.Request, waiting, progress)
	if err != nil {
		return reply{}, err
	}
	if failure := answer.envelope.GetError(); failure != nil {
		closeFiles(answer.files)
		return reply{}, fromWire(failure)
	}
	return answer, nil
}

func unexpected(e *wire.Envelope) error {
	return violation("the daemon answered with %T", e.GetBody())
}

// Ask sends a request that carries no descriptors, and returns its reply, which is an *R: a *wire.List
// is answered by a wire.ListReply, for example. Progress may be nil; it is called on this goroutine.
func Ask[R any](ctx context.Context, c *Client, request proto.Message,
	progress func(*wire.Progress)) (*R, error) {
	answer, err := c.ask(ctx, request, nil, progress)
	if err != nil {
		return nil, err
	}
	closeFiles(answer.files)
	if r, ok := any(bodyOf(answer.envelope)).(*R); ok {
		return r, nil
	}
	return nil, unexpected(answer.envelope)
}

// ListPages calls fn with the builds of one page after the other, and stops at its first error, which it returns. The
// request then says with after where it stopped: behind the last page that fn had. Progress is as for Ask.
func (c *Client) ListPages(ctx context.Context, r *wire.List, progress func(*wire.Progress), fn func([]*wire.Build) error) error {
	for {
		reply, err := Ask[wire.ListReply](ctx, c, r, progress)
		if err != nil {
			return err
		}
		if err := fn(reply.GetBuilds()); err != nil || reply.GetNext() == "" {
			return err
		}
		if reply.GetNext() == r.GetAfter() {
			return errors.New("list: the daemon repeats a page")
		}
		r.After = reply.GetNext()
	}
}

// Follow waits for a job's end, and gives the job as it ended. That it failed is no error of this call. Progress is as
// for Ask.
func (c *Client) Follow(ctx context.Context, r *wire.Follow, progress func(*wire.Progress)) (*wire.Job, error) {
	reply, err := Ask[wire.JobsReply](ctx, c, r, progress)
	if err != nil {
		return nil, err
	}
	if jobs := reply.GetJobs(); len(jobs) == 1 {
		return jobs[0], nil
	}
	return nil, violation("the daemon answered with %d jobs to Follow", len(reply.GetJobs()))
}

// Stop has the daemon end. It returns when the process has ended, or with an error of the context.
func (c *Client) Stop(ctx context.Context) error {
	answer, err := c.ask(ctx, &wire.Stop{}, nil, nil)
	if err != nil {
		return err
	}
	if answer.envelope.GetStopReply() == nil || len(answer.files) != 1 {
		closeFiles(answer.files)
		return unexpected(answer.envelope)
	}
	ended := make(chan error, 1) // the pipe of some daemons has no deadlines
	ends := answer.files[0]
	go func() {
		_, err := io.Copy(io.Discard, ends)
		ended <- errors.Join(err, ends.Close())
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
