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

// ReportTimeout is how long Load waits for what the daemon makes of a refusal: it may look into the
// build, and an application that can load the source model should not wait for that for long.
const ReportTimeout = 5 * time.Second

// Lease is a build that is kept as it is until Close.
type Lease struct {
	Reply *wire.AcquireReply // the daemon's answer: outcome, options to load with, why
	// the view's directory; nil for answers without one: load the model as it is
	View *os.File
}

// Path is the graph's path through the descriptor, which needs no rights on the daemon's
// directories; empty without a view.
func (l *Lease) Path() string {
	if l.View == nil {
		return ""
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", l.View.Fd(), l.Reply.GetGraph())
}

// Close ends the lease. Nothing that was made from the build may live any more.
func (l *Lease) Close() error {
	if l.View == nil {
		return nil
	}
	return l.View.Close()
}

// Refusal is what ONNX Runtime has against a build, as an error.
type Refusal struct {
	Code int32  // ONNX Runtime's, OrtErrorCode
	Text string // its message, whole
}

// Error is ONNX Runtime's text.
func (r *Refusal) Error() string { return r.Text }

// ortMessage is how ONNX Runtime's bindings spell an error: "[ONNXRuntimeError] : 10 :
// INVALID_GRAPH : ...".
var ortMessage = regexp.MustCompile(`\[ONNXRuntimeError\] : (\d{1,9}) : `)

// ParseRefusal finds a Refusal in an error, or reads one from ONNX Runtime's message. Errors of
// other origin have none.
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

// RefusedError says that neither a build loaded nor the one that the daemon gave instead. The
// caller can load the source model.
type RefusedError struct {
	Build    string              // the last one that was refused
	Decision []*wire.ReportReply // what the daemon said to each report; nil where it said nothing
	Errs     []error             // the loads' errors, and what went wrong with asking again
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

// Load acquires a build and has the caller load it. When ONNX Runtime refuses it (see
// ParseRefusal), Load reports that, and if the daemon says so, calls load again with the daemon's
// next answer. The caller closes the lease. A refused build is a *RefusedError; other errors of
// load are returned as they are, and not reported.
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
		// The lease ends only now, because the daemon looks into the loaded files.
		if err := lease.Close(); err != nil {
			return nil, refusals.withCause(err)
		}
		if decision.GetDecision() != "retry" {
			break
		}
	}
	return nil, &refusals
}

// withCause is an error that came after refusals, or alone.
func (e *RefusedError) withCause(err error) error {
	if len(e.Errs) == 0 {
		return err
	}
	e.Errs = append(e.Errs, err)
	return e
}

// report gives nil where the daemon does not answer in time: there is nothing that an application
// could do.
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

// truncated is what the daemon keeps of a text. Protobuf takes only valid UTF-8.
func truncated(text string) string {
	end := min(len(text), unixsock.MaxReportText)
	for end > 0 && end < len(text) && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.ToValidUTF8(text[:end], "\uFFFD")
}

// Ask connects, calls ask, and closes the connection. If the daemon ends before it has answered,
// Ask waits up to back for another daemon and asks that, once only, because this very request may
// be what ends the daemon. An error that the daemon returned, or a breach of the protocol, is the
// answer. A view that ask got stays valid.
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
