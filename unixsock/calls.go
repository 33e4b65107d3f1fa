package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

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

// Ask sends a request that carries no descriptors, and returns its reply, which is an *R: a
// *wire.List is answered by a wire.ListReply, for example. Progress may be nil; it is called on
// this goroutine.
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

// ListPages calls fn with the builds of one page after the other, and stops at its first error,
// which it returns. Then the request's after is set to continue after the last page that fn got.
// Progress is as for Ask.
func (c *Client) ListPages(ctx context.Context, r *wire.List, progress func(*wire.Progress),
	fn func([]*wire.Build) error) error {
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

// Follow waits for a job's end, and returns its final state. The failure of the job is not an error
// of the call. Progress is as for Ask.
func (c *Client) Follow(ctx context.Context, r *wire.Follow,
	progress func(*wire.Progress)) (*wire.Job, error) {
	reply, err := Ask[wire.JobsReply](ctx, c, r, progress)
	if err != nil {
		return nil, err
	}
	if jobs := reply.GetJobs(); len(jobs) == 1 {
		return jobs[0], nil
	}
	return nil, violation("the daemon answered with %d jobs to Follow", len(reply.GetJobs()))
}

// Stop tells the daemon to end, and returns when the process has ended or ctx is done.
func (c *Client) Stop(ctx context.Context) error {
	answer, err := c.ask(ctx, &wire.Stop{}, nil, nil)
	if err != nil {
		return err
	}
	if answer.envelope.GetStopReply() == nil || len(answer.files) != 1 {
		closeFiles(answer.files)
		return unexpected(answer.envelope)
	}
	ended := make(chan error, 1) // a goroutine, because not every pipe supports deadlines
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

// maxNeedReplies bounds how often a daemon may ask for more external data for one request. Once
// suffices, unless the model changes in between.
const maxNeedReplies = 3

// External opens external data by its location as the model spells it. member is the model that
// refers to it: 0 is Acquire.model (always without a group), 1 the first of Acquire.group.
type External func(member int, location string) (*os.File, error)

// Acquire requests a build. The request's fields "fd" are indices into fds, which the caller
// closes. If the daemon asks for external data, Acquire opens it with external, which may be nil,
// and closes it. Progress may be nil; it is called on this goroutine. The file, nil if the answer
// has none, is the view's directory. It is the lease, and the caller closes it.
func (c *Client) Acquire(ctx context.Context, request *wire.Acquire, fds []*os.File,
	external External, progress func(*wire.Progress)) (*wire.AcquireReply, *os.File, error) {
	all := slices.Clip(fds)
	defer func() { closeFiles(all[len(fds):]) }()
	for asked := range maxNeedReplies {
		answer, err := c.askWithFiles(ctx, "acquire", request, all, progress)
		if err != nil {
			return nil, nil, err
		}
		need := answer.envelope.GetNeed()
		if need == nil {
			return buildOf(answer)
		}
		closeFiles(answer.files)
		if asked == 0 {
			request = proto.CloneOf(request) // so that the caller's is unchanged
		}
		if all, err = openNeeded(request, all, need, external); err != nil {
			return nil, nil, err
		}
	}
	return nil, nil, violation("the daemon requests external data again and again: the model " +
		"may be changing")
}

// Put sends files that were compiled under a claim of this connection. Their fields "fd" are
// indices into fds, which the caller closes: the daemon copies them first. The file is as
// Acquire's.
func (c *Client) Put(ctx context.Context, request *wire.Put, fds []*os.File,
	progress func(*wire.Progress)) (*wire.AcquireReply, *os.File, error) {
	answer, err := c.askWithFiles(ctx, "put", request, fds, progress)
	if err != nil {
		return nil, nil, err
	}
	return buildOf(answer)
}

// Import sends a build of another machine. Files are as Put's; without any the daemon only returns
// the outcome that an import would have.
func (c *Client) Import(ctx context.Context, request *wire.Import, fds []*os.File,
	progress func(*wire.Progress)) (*wire.ImportReply, error) {
	answer, err := c.askWithFiles(ctx, "import", request, fds, progress)
	if err != nil {
		return nil, err
	}
	closeFiles(answer.files)
	if r := answer.envelope.GetImportReply(); r != nil {
		return r, nil
	}
	return nil, unexpected(answer.envelope)
}

// Export requests a build for export. The file is the view's directory. It is the lease, and the
// caller closes it.
func (c *Client) Export(ctx context.Context, build string) (*wire.ExportReply, *os.File, error) {
	answer, err := c.ask(ctx, &wire.Export{Build: build}, nil, nil)
	if err != nil {
		return nil, nil, err
	}
	r := answer.envelope.GetExportReply()
	if r == nil || len(answer.files) != 1 {
		closeFiles(answer.files)
		return nil, nil, unexpected(answer.envelope)
	}
	return r, answer.files[0], nil
}

// askWithFiles is ask for a request with descriptors.
func (c *Client) askWithFiles(ctx context.Context, what string, message proto.Message,
	files []*os.File,
	progress func(*wire.Progress)) (reply, error) {
	if len(files) > MaxAttached {
		return reply{}, descriptorRefusal("%s: %d descriptors; a request may have %d", what,
			len(files), MaxAttached)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	defer runtime.KeepAlive(files)
	return c.ask(ctx, message, fds, progress)
}

// buildOf finds the descriptor that the answer names, and closes any other.
func buildOf(answer reply) (*wire.AcquireReply, *os.File, error) {
	r := answer.envelope.GetAcquireReply()
	if r == nil {
		closeFiles(answer.files)
		return nil, nil, unexpected(answer.envelope)
	}
	if err := checkBuild(r, answer.files); err != nil || r.Fd == nil {
		closeFiles(answer.files)
		return r, nil, err
	}
	view := answer.files[r.GetFd()]
	closeFiles(slices.DeleteFunc(answer.files, func(f *os.File) bool { return f == view }))
	return r, view, nil
}

var outcomesWithBuild = []string{"hit", "compiled", "waited", "put"}

// checkBuild fails if the answer lacks a view or names a graph outside it: graphs load by name.
func checkBuild(r *wire.AcquireReply, files []*os.File) error {
	if r.Fd == nil && r.GetView() == "" {
		if slices.Contains(outcomesWithBuild, r.GetOutcome()) {
			return violation("the reply %q has no view", r.GetOutcome())
		}
		return nil
	}
	graphs := []string{r.GetGraph()}
	for _, m := range r.GetMembers() {
		graphs = append(graphs, m.GetGraph())
	}
	for _, graph := range graphs {
		if graph == "." || !filepath.IsLocal(filepath.FromSlash(graph)) ||
			path.Clean(graph) != graph || strings.ContainsRune(graph, 0) {
			return violation("the graph %q is outside the view", graph)
		}
	}
	if len(r.GetMembers()) > 0 && int64(r.GetMember()) >= int64(len(r.GetMembers())) {
		return violation("the model is member %d of %d", r.GetMember(), len(r.GetMembers()))
	}
	if r.Fd == nil {
		return nil
	}
	if int64(r.GetFd()) >= int64(len(files)) {
		return violation("the reply names descriptor %d of %d", r.GetFd(), len(files))
	}
	info, err := files[r.GetFd()].Stat()
	if err == nil && !info.IsDir() {
		return violation("the descriptor of the view is not a directory")
	}
	return err
}

// openNeeded adds external data to a request. If it fails it still returns the files it opened.
func openNeeded(request *wire.Acquire, files []*os.File, need *wire.Need,
	external External) ([]*os.File, error) {
	models := append([]*wire.Model{request.GetModel()}, request.GetGroup()...)
	if n := len(need.GetMembers()); n != 0 && n != len(need.GetLocations()) {
		return files, violation("%d locations of %d members are needed",
			len(need.GetLocations()), n)
	}
	for i, location := range need.GetLocations() {
		member := 0
		if len(need.GetMembers()) > 0 {
			member = int(need.GetMembers()[i])
		}
		if member >= len(models) {
			return files, violation("external data is needed for member %d of "+
				"%d", member, len(models))
		}
		if err := checkNeed(models[member], location, external, len(files)); err != nil {
			return files, err
		}
		f, err := external(member, location)
		if err != nil {
			return files, err
		}
		models[member].External = append(models[member].External,
			&wire.ExternalFile{Location: location, Fd: uint32(len(files))})
		files = append(files, f)
	}
	return files, nil
}

// checkNeed refuses locations that no model may refer to, even if the daemon asks for them.
func checkNeed(model *wire.Model, location string, external External, files int) error {
	bad := func(format string) error {
		return &Error{Class: wire.ErrorClass_BAD_MODEL, Text: fmt.Sprintf(format, location),
			Facts: map[string]string{"file": location}}
	}
	sent := func(x *wire.ExternalFile) bool { return x.GetLocation() == location }
	switch {
	case !filepath.IsLocal(filepath.FromSlash(location)):
		return bad("external data %q lies outside the model's directory")
	case slices.ContainsFunc(model.GetExternal(), sent):
		return violation("external data %q was sent, and is requested again", location)
	case external == nil:
		return bad("the model refers to external data %q")
	case files >= MaxAttached:
		return descriptorRefusal("acquire: the model refers to more than %d files", MaxAttached-1)
	}
	return nil
}
