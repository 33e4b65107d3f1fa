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

// plain is ask for the requests that carry no descriptors either way.
func plain[R any](ctx context.Context, c *Client, message proto.Message,
	progress func(*wire.Progress)) (*R, error) {
	answer, err := c.ask(ctx, message, nil, progress)
	if err != nil {
		return nil, err
	}
	closeFiles(answer.files)
	if r, ok := any(bodyOf(answer.envelope)).(*R); ok {
		return r, nil
	}
	return nil, unexpected(answer.envelope)
}

// List gives one page of builds: those that the caller may see. Progress may be nil; it is called on this goroutine.
func (c *Client) List(ctx context.Context, r *wire.List, progress func(*wire.Progress)) (*wire.ListReply, error) {
	return plain[wire.ListReply](ctx, c, r, progress)
}

// ListPages calls fn with the builds of one page after the other, and stops at its first error, which it returns. The
// request then says with after where it stopped: behind the last page that fn had. Progress is as for List.
func (c *Client) ListPages(ctx context.Context, r *wire.List, progress func(*wire.Progress), fn func([]*wire.Build) error) error {
	for {
		reply, err := c.List(ctx, r, progress)
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

// Show describes an entry with its builds and history.
func (c *Client) Show(ctx context.Context, r *wire.Show) (*wire.ShowReply, error) {
	return plain[wire.ShowReply](ctx, c, r, nil)
}

// Invalidate withholds builds.
func (c *Client) Invalidate(ctx context.Context, r *wire.Invalidate) (*wire.ChangeReply, error) {
	return plain[wire.ChangeReply](ctx, c, r, nil)
}

// Remove deletes builds.
func (c *Client) Remove(ctx context.Context, r *wire.Remove) (*wire.ChangeReply, error) {
	return plain[wire.ChangeReply](ctx, c, r, nil)
}

// Pin keeps builds whatever space is short.
func (c *Client) Pin(ctx context.Context, r *wire.Pin) (*wire.ChangeReply, error) {
	return plain[wire.ChangeReply](ctx, c, r, nil)
}

// Unpin takes that back.
func (c *Client) Unpin(ctx context.Context, r *wire.Unpin) (*wire.ChangeReply, error) {
	return plain[wire.ChangeReply](ctx, c, r, nil)
}

// Collect removes builds until the store keeps to its bounds, or plans to. Progress may be nil; it is called on this
// goroutine.
func (c *Client) Collect(ctx context.Context, r *wire.Collect, progress func(*wire.Progress)) (*wire.CollectReply, error) {
	return plain[wire.CollectReply](ctx, c, r, progress)
}

// Pack packs builds or makes them whole again. Progress may be nil; it is called on this goroutine.
func (c *Client) Pack(ctx context.Context, r *wire.Pack, progress func(*wire.Progress)) (*wire.PackReply, error) {
	return plain[wire.PackReply](ctx, c, r, progress)
}

// Layout tells where the bytes of builds' files stand.
func (c *Client) Layout(ctx context.Context, r *wire.Layout) (*wire.LayoutReply, error) {
	return plain[wire.LayoutReply](ctx, c, r, nil)
}

// Usage tells where the space goes, a page at a time. Progress is as for List.
func (c *Client) Usage(ctx context.Context, r *wire.Usage, progress func(*wire.Progress)) (*wire.UsageReply, error) {
	return plain[wire.UsageReply](ctx, c, r, progress)
}

// Status tells how the daemon is.
func (c *Client) Status(ctx context.Context) (*wire.StatusReply, error) {
	return plain[wire.StatusReply](ctx, c, &wire.Status{}, nil)
}

// Probe tells which runtimes, execution providers and devices there are.
func (c *Client) Probe(ctx context.Context, r *wire.Probe) (*wire.ProbeReply, error) {
	return plain[wire.ProbeReply](ctx, c, r, nil)
}

// Check looks for damage in the store. Progress is as for List.
func (c *Client) Check(ctx context.Context, r *wire.Check, progress func(*wire.Progress)) (*wire.CheckReply, error) {
	return plain[wire.CheckReply](ctx, c, r, progress)
}

// Report tells that ONNX Runtime refused a build. The runtime's libraries are named by path: a report carries no descriptors.
func (c *Client) Report(ctx context.Context, r *wire.Report) (*wire.ReportReply, error) {
	return plain[wire.ReportReply](ctx, c, r, nil)
}

// Why explains an entry. For a request that may have none, call Acquire with EXPLAIN.
func (c *Client) Why(ctx context.Context, r *wire.Why) (*wire.Explanation, error) {
	return plain[wire.Explanation](ctx, c, r, nil)
}

// Events gives what has happened, oldest first.
func (c *Client) Events(ctx context.Context, r *wire.Events) (*wire.EventsReply, error) {
	return plain[wire.EventsReply](ctx, c, r, nil)
}

// Doctor looks for what is wrong on the daemon's machine.
func (c *Client) Doctor(ctx context.Context) (*wire.DoctorReply, error) {
	return plain[wire.DoctorReply](ctx, c, &wire.Doctor{}, nil)
}

// Jobs gives the compiles that wait or run, and the failures that are remembered: those that the caller may see.
func (c *Client) Jobs(ctx context.Context) (*wire.JobsReply, error) {
	return plain[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
}

// Follow waits for a job's end, and gives the job as it ended. That it failed is no error of this call. Progress may be
// nil; it is called on this goroutine.
func (c *Client) Follow(ctx context.Context, r *wire.Follow, progress func(*wire.Progress)) (*wire.Job, error) {
	reply, err := plain[wire.JobsReply](ctx, c, r, progress)
	if err != nil {
		return nil, err
	}
	if jobs := reply.GetJobs(); len(jobs) == 1 {
		return jobs[0], nil
	}
	return nil, violation("the daemon answered with %d jobs to Follow", len(reply.GetJobs()))
}

// CancelJobs ends compiles, and gives those that it ended.
func (c *Client) CancelJobs(ctx context.Context, r *wire.CancelJobs) (*wire.JobsReply, error) {
	return plain[wire.JobsReply](ctx, c, r, nil)
}

// RetryJobs has the daemon forget failures, and gives those that it forgot.
func (c *Client) RetryJobs(ctx context.Context, r *wire.RetryJobs) (*wire.JobsReply, error) {
	return plain[wire.JobsReply](ctx, c, r, nil)
}

// GiveUp ends a claim without a result.
func (c *Client) GiveUp(ctx context.Context, r *wire.GiveUp) (*wire.GiveUpReply, error) {
	return plain[wire.GiveUpReply](ctx, c, r, nil)
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
