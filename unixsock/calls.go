package unixsock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// maxNeeds bounds how often a daemon may ask for more external data for one model: once is enough, unless the model
// was changed in between.
const maxNeeds = 3

// Acquire asks for a build. The request's fields "fd" are indices into fds, which stay the caller's. For external
// data that the daemon asks for, external opens a location as the model spells it (it may be nil if there can be
// none); those files are closed here. Progress may be nil; it is called on this goroutine. The file, nil if the
// answer has none, is the view's folder: the caller's, and the lease.
func (c *Client) Acquire(ctx context.Context, request *wire.Acquire, fds []*os.File, external func(location string) (*os.File, error), progress func(*wire.Progress)) (*wire.AcquireReply, *os.File, error) {
	request = proto.CloneOf(request)
	all := append([]*os.File(nil), fds...)
	defer func() { closeFiles(all[len(fds):]) }()
	for range maxNeeds {
		answer, err := c.acquireOnce(ctx, request, all, progress)
		if err != nil {
			return nil, nil, err
		}
		if reply := answer.envelope.GetAcquireReply(); reply != nil {
			view, err := viewOf(reply, answer.files)
			return reply, view, err
		}
		closeFiles(answer.files)
		need := answer.envelope.GetNeed()
		if need == nil {
			return nil, nil, unexpected(answer.envelope)
		}
		if all, err = openNeeded(request, all, need.GetLocations(), external); err != nil {
			return nil, nil, err
		}
	}
	return nil, nil, refused("acquire: the daemon keeps asking for external data; is the model being changed?")
}

func (c *Client) acquireOnce(ctx context.Context, request *wire.Acquire, files []*os.File, progress func(*wire.Progress)) (reply, error) {
	if len(files) > MaxAttached {
		return reply{}, refused("acquire: %d descriptors; a request may have %d", len(files), MaxAttached)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	defer runtime.KeepAlive(files)
	return c.ask(ctx, &wire.Envelope{Body: &wire.Envelope_Acquire{Acquire: request}}, fds, progress)
}

// viewOf finds the descriptor that the reply names, and closes any other.
func viewOf(r *wire.AcquireReply, files []*os.File) (*os.File, error) {
	if r.Fd == nil {
		closeFiles(files)
		return nil, nil
	}
	if int64(r.GetFd()) >= int64(len(files)) {
		closeFiles(files)
		return nil, violation("the reply names descriptor %d of %d", r.GetFd(), len(files))
	}
	view := files[r.GetFd()]
	for _, f := range files {
		if f != view {
			closeFiles([]*os.File{f})
		}
	}
	return view, nil
}

// openNeeded adds external data to a request. What it opened is in the result also when it fails.
func openNeeded(request *wire.Acquire, files []*os.File, locations []string, external func(string) (*os.File, error)) ([]*os.File, error) {
	known := make(map[string]bool)
	for _, x := range request.GetModel().GetExternal() {
		known[x.GetLocation()] = true
	}
	for _, location := range locations {
		if known[location] {
			return files, refused("acquire: external data %q was sent and asked for again", location)
		}
		if external == nil {
			return files, &Error{Class: wire.ErrorClass_BAD_MODEL, Text: fmt.Sprintf("the model refers to external data %q", location), Facts: map[string]string{"file": location}}
		}
		if len(files) >= MaxAttached {
			return files, refused("acquire: the model refers to more than %d files", MaxAttached-1)
		}
		f, err := external(location)
		if err != nil {
			return files, err
		}
		known[location] = true
		request.Model.External = append(request.Model.External, &wire.ExternalFile{Location: location, Fd: uint32(len(files))})
		files = append(files, f)
	}
	return files, nil
}

// ask sends a request and waits; an Error frame becomes the error.
func (c *Client) ask(ctx context.Context, envelope *wire.Envelope, fds []int, progress func(*wire.Progress)) (reply, error) {
	waiting := newCall(progress != nil)
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
func plain[R any](ctx context.Context, c *Client, envelope *wire.Envelope, get func(*wire.Envelope) *R) (*R, error) {
	answer, err := c.ask(ctx, envelope, nil, nil)
	if err != nil {
		return nil, err
	}
	closeFiles(answer.files)
	if r := get(answer.envelope); r != nil {
		return r, nil
	}
	return nil, unexpected(answer.envelope)
}

// Release tells that the client is done with a build. Closing the view is what ends the lease.
func (c *Client) Release(ctx context.Context, r *wire.Release) (*wire.ReleaseReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Release{Release: r}}, (*wire.Envelope).GetReleaseReply)
}

// List gives one page of builds: those that the caller may see.
func (c *Client) List(ctx context.Context, r *wire.List) (*wire.ListReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_List{List: r}}, (*wire.Envelope).GetListReply)
}

// ListAll gives the builds of all pages.
func (c *Client) ListAll(ctx context.Context, r *wire.List) ([]*wire.Build, error) {
	page := proto.CloneOf(r)
	var all []*wire.Build
	for {
		reply, err := c.List(ctx, page)
		if err != nil {
			return all, err
		}
		all = append(all, reply.GetBuilds()...)
		if reply.GetNext() == "" {
			return all, nil
		}
		if reply.GetNext() == page.GetAfter() {
			return all, errors.New("list: the daemon repeats a page")
		}
		page.After = reply.GetNext()
	}
}

// Show describes an entry with its builds and history.
func (c *Client) Show(ctx context.Context, r *wire.Show) (*wire.ShowReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Show{Show: r}}, (*wire.Envelope).GetShowReply)
}

// Invalidate withholds builds.
func (c *Client) Invalidate(ctx context.Context, r *wire.Invalidate) (*wire.ChangeReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Invalidate{Invalidate: r}}, (*wire.Envelope).GetChangeReply)
}

// Remove deletes builds.
func (c *Client) Remove(ctx context.Context, r *wire.Remove) (*wire.ChangeReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Remove{Remove: r}}, (*wire.Envelope).GetChangeReply)
}

// Status tells how the daemon is.
func (c *Client) Status(ctx context.Context) (*wire.StatusReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Status{Status: &wire.Status{}}}, (*wire.Envelope).GetStatusReply)
}

// Probe tells which runtimes, execution providers and devices there are.
func (c *Client) Probe(ctx context.Context, r *wire.Probe) (*wire.ProbeReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Probe{Probe: r}}, (*wire.Envelope).GetProbeReply)
}

// Check looks for damage in the store.
func (c *Client) Check(ctx context.Context, r *wire.Check) (*wire.CheckReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Check{Check: r}}, (*wire.Envelope).GetCheckReply)
}

// Report tells that ONNX Runtime refused a build. The runtime's libraries are named by path: a report carries no descriptors.
func (c *Client) Report(ctx context.Context, r *wire.Report) (*wire.ReportReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Report{Report: r}}, (*wire.Envelope).GetReportReply)
}

// Why explains an entry. For a request that may have none, call Acquire with EXPLAIN.
func (c *Client) Why(ctx context.Context, r *wire.Why) (*wire.Explanation, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Why{Why: r}}, (*wire.Envelope).GetExplanation)
}

// Events gives what has happened, oldest first.
func (c *Client) Events(ctx context.Context, r *wire.Events) (*wire.EventsReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Events{Events: r}}, (*wire.Envelope).GetEventsReply)
}

// Doctor looks for what is wrong on the daemon's machine.
func (c *Client) Doctor(ctx context.Context) (*wire.DoctorReply, error) {
	return plain(ctx, c, &wire.Envelope{Body: &wire.Envelope_Doctor{Doctor: &wire.Doctor{}}}, (*wire.Envelope).GetDoctorReply)
}
