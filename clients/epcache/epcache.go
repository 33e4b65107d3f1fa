// Package epcache loads builds in applications that are written in Go, with a fallback to the
// source model, as the Python package does. It needs a [unixsock.Client]; start at Load.
package epcache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// ReportTimeout is how long Load waits for the daemon's decision on a report. The daemon may
// examine the build, and an application that can load the source model should not wait long for
// that.
const ReportTimeout = 5 * time.Second

// Lease is a build. Its files do not change until Close.
type Lease struct {
	Reply *wire.AcquireReply // the daemon's answer: outcome, options to load with, why
	// View is the view's directory, nil for answers without one, with which the application loads
	// the source model.
	View *os.File
}

// Path returns the graph's path through the descriptor, which needs no permissions on the daemon's
// directories; "" without a view.
func (l *Lease) Path() string {
	if l.View == nil {
		return ""
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", l.View.Fd(), l.Reply.GetGraph())
}

// Close ends the lease. Release all sessions of the build before.
func (l *Lease) Close() error {
	if l.View == nil {
		return nil
	}
	return l.View.Close()
}

// Refusal is ONNX Runtime's error for a build.
type Refusal struct {
	Code int32  // ONNX Runtime's, OrtErrorCode
	Text string // its complete message
}

// Error returns ONNX Runtime's text.
func (r *Refusal) Error() string { return r.Text }

// ortMessage matches an error of ONNX Runtime's bindings: "[ONNXRuntimeError] : 10 : INVALID_GRAPH
// : ...".
var ortMessage = regexp.MustCompile(`\[ONNXRuntimeError\] : (\d{1,9}) : `)

// ParseRefusal finds a Refusal in an error, or reads one from ONNX Runtime's message. It returns
// false for other errors.
func ParseRefusal(err error) (*Refusal, bool) {
	var r *Refusal
	if err == nil || errors.As(err, &r) {
		return r, r != nil
	}
	found := ortMessage.FindStringSubmatch(err.Error())
	if found == nil {
		return nil, false
	}
	code, err2 := strconv.ParseInt(found[1], 10, 32)
	if err2 != nil {
		return nil, false
	}
	return &Refusal{Code: int32(code), Text: err.Error()}, true
}

// RefusedError says that neither a build nor its replacement from the daemon loaded. The caller can
// load the source model.
type RefusedError struct {
	Build    string              // the last refused build
	Decision []*wire.ReportReply // the daemon's decision on each report; nil if it did not answer
	Errs     []error             // errors of the loads, and of requests for a replacement
}

// Error names the build, and has the errors of all loads and reports.
func (e *RefusedError) Error() string {
	text := fmt.Sprintf("build %s does not load: %v", e.Build, errors.Join(e.Errs...))
	for _, d := range e.Decision {
		if d != nil {
			text += fmt.Sprintf("; the daemon says %s: %s", d.GetDecision(), d.GetText())
		}
	}
	return text
}

// Unwrap returns the errors of the loads.
func (e *RefusedError) Unwrap() []error { return e.Errs }

// Request is the arguments of [unixsock.Client.Acquire].
type Request struct {
	Acquire  *wire.Acquire
	Files    []*os.File
	External unixsock.External
	Progress func(*wire.Progress)
}

// Load acquires a build and calls load. If ONNX Runtime refuses the build (see ParseRefusal), Load
// reports that, and if the daemon decides so, calls load again with the daemon's next answer. The
// caller closes the lease. A refused build is a *RefusedError; other errors of load are returned
// unchanged, and not reported.
func Load(ctx context.Context, c *unixsock.Client, r Request,
	load func(*Lease) error) (*Lease, error) {
	var refusals RefusedError
	for range 2 {
		reply, view, err := c.Acquire(ctx, r.Acquire, r.Files, r.External, r.Progress)
		if err != nil {
			return nil, refusals.withCause(err)
		}
		lease := &Lease{Reply: reply, View: view}
		if err = load(lease); err == nil {
			return lease, nil
		}
		refusal, ok := ParseRefusal(err)
		if !ok || reply.GetBuild() == "" {
			return nil, errors.Join(refusals.withCause(err), lease.Close())
		}
		refusals.Build, refusals.Errs = reply.GetBuild(), append(refusals.Errs, err)
		decision := report(ctx, c, r.Acquire.GetRuntime(), reply, refusal)
		refusals.Decision = append(refusals.Decision, decision)
		// The lease ends only after the report, because the daemon examines the loaded files.
		if err := lease.Close(); err != nil {
			return nil, refusals.withCause(err)
		}
		if decision.GetDecision() != "retry" {
			break
		}
	}
	return nil, &refusals
}

// withCause adds an error that followed refusals; without refusals it returns err.
func (e *RefusedError) withCause(err error) error {
	if len(e.Errs) == 0 {
		return err
	}
	e.Errs = append(e.Errs, err)
	return e
}

// report returns nil if the daemon does not answer in time, because the application cannot do
// anything about it.
func report(ctx context.Context, c *unixsock.Client, with *wire.Runtime, reply *wire.AcquireReply,
	refusal *Refusal) *wire.ReportReply {
	runtime := proto.CloneOf(with)
	for _, library := range runtime.GetEpLibraries() {
		library.Fd = nil
	}
	ctx, cancel := context.WithTimeout(ctx, ReportTimeout)
	defer cancel()
	decision, err := unixsock.Ask[wire.ReportReply](ctx, c, &wire.Report{
		Build: reply.GetBuild(), Code: refusal.Code, Text: truncated(refusal.Text),
		OrtVersion: runtime.GetOrtVersion(), Graph: reply.GetGraph(), Runtime: runtime}, nil)
	if err != nil {
		return nil
	}
	return decision
}

// truncated shortens a text to the part that the daemon keeps, as valid UTF-8 for protobuf.
func truncated(text string) string {
	end := min(len(text), unixsock.MaxReportText)
	for end > 0 && end < len(text) && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.ToValidUTF8(text[:end], "\uFFFD")
}

// Ask connects, calls ask, and closes the connection. If the daemon ends before it has answered,
// Ask waits up to back for another daemon and retries, but only once, because this request may be
// the reason of the end. It does not retry after an error from the daemon or a violation of the
// protocol. A view that ask got stays valid.
func Ask(ctx context.Context, d unixsock.Dialer, back time.Duration,
	ask func(*unixsock.Client) error,
	paths ...string) error {
	client, err := d.Dial(ctx, paths...)
	if err != nil {
		return err
	}
	if err = errors.Join(ask(client), client.Close()); !unixsock.ConnectionEnded(err) {
		return err
	}
	d.Wait = back
	again, dialErr := d.Dial(ctx, paths...)
	if dialErr != nil {
		return fmt.Errorf("no daemon answers now: %w: %w", dialErr, err)
	}
	return errors.Join(ask(again), again.Close())
}
