package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// Limits of a client's patience, beside the caller's own. A daemon that keeps to the protocol never
// comes near them.
const (
	// for which a request that does not fit into the socket may stay unread
	clientWriteTimeout = 2 * time.Second
	clientFrameTimeout = 2 * time.Second // from the first byte of an answer to its last
	// after this time without an answer the client asks on another connection whether the daemon is
	// alive
	silenceLimit  = 5 * time.Second
	aliveInterval = 2 * time.Second // interval of these questions
	// for which an answer is taken after the caller's limit, because this process may not have run
	lateLimit = 50 * time.Millisecond
)

// Client is one connection to a daemon. Its methods may be called at the same time; their requests
// run at the same time in the daemon. An error from the daemon is an *Error; when the connection
// breaks, every call answers with ErrConnectionLost, and a new Client is needed. A context that
// ends cancels its request in the daemon as well.
type Client struct {
	stream      *stream
	hello       *wire.HelloReply
	last        atomic.Uint64 // request number
	done        chan struct{} // closed when the connection has ended
	reason      error         // why it has; valid after done is closed
	closed      atomic.Bool
	alive       func(context.Context) error // asks on another connection
	mute        atomic.Bool                 // and it has not answered
	heard       atomic.Int64                // when a frame came last, in nanoseconds since made
	waiterCount time.Time

	mu            sync.Mutex
	calls         map[uint64]*call // nil: the caller gave up, and the answer is still to come
	reading       bool             // a goroutine reads, or is about to; see callerread.go
	connectionEnd bool             // no new calls
}

// call is a request that waits for its answer. A slow progress callback loses reports, never the
// answer.
type call struct {
	answer   chan reply // buffered for one
	progress chan *wire.Progress
	events   chan *wire.Event // of a subscription
	missed   atomic.Bool      // an event was dropped for a later one
}

type reply struct {
	envelope *wire.Envelope
	files    []*os.File
}

// Hello is what the daemon reported about itself, and the user that it takes this process for.
func (c *Client) Hello() *wire.HelloReply { return c.hello }

// Close ends the connection, and with it the requests that wait. View descriptors that were handed
// out stay good.
func (c *Client) Close() error {
	c.closed.Store(true)
	err := c.stream.conn.Close()
	c.continueReading() // reads on until the end of the connection
	<-c.done
	if errors.Is(err, net.ErrClosed) {
		return nil // the daemon was first
	}
	return err
}

// read hands answers to their callers, and closes the descriptors of callers that gave up.
func (c *Client) read() {
	for {
		if err := c.receive(c.stream.envelope(clientFrameTimeout)); err != nil {
			c.end(err)
			return
		}
		if c.stopReading() {
			return
		}
	}
}

// end is called by the goroutine that reads, when the connection has ended.
func (c *Client) end(err error) {
	defer close(c.done)
	c.mu.Lock()
	c.connectionEnd = true
	c.mu.Unlock()
	c.stream.closeDescriptors()
	if c.reason = lost(err); c.mute.Load() {
		c.reason = fmt.Errorf("%w: it sent no reply for %v, and does not accept a new "+
			"connection", ErrConnectionLost, silenceLimit)
	}
	// Only after reading stopped: the daemon sees the close and cancels what is still running.
	_ = c.stream.conn.Close()
}

func (c *Client) receive(envelope *wire.Envelope, fds []int, _ []byte,
	err error) error {
	if err != nil {
		return err
	}
	c.heard.Store(int64(time.Since(c.waiterCount)))
	number := envelope.GetRequest()
	if number == 0 {
		closeAll(fds)
		if envelope.GetError() == nil {
			return violation("a frame under request number 0")
		}
		return fromWire(envelope.GetError()) // the last word before the daemon closes
	}
	c.deliver(number, envelope, fds)
	return nil
}

// deliver never waits for the caller: answers to others come behind.
func (c *Client) deliver(number uint64, envelope *wire.Envelope, fds []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	waiting := c.calls[number]
	progress, event := envelope.GetProgress(), envelope.GetEvent()
	switch {
	case waiting == nil: // the caller gave up
	case progress != nil:
		select {
		case waiting.progress <- progress:
		default:
		}
	case event != nil:
		waiting.enqueueEvent(event)
	default:
		delete(c.calls, number)
		waiting.answer <- reply{envelope, toFiles(fds)}
		return
	}
	closeAll(fds)
}

// lost says that the connection is gone and, as far as that is known, why.
func lost(err error) error {
	if e, is := errors.AsType[*Error](err); is {
		return fmt.Errorf("%w: %w", ErrConnectionLost, e)
	}
	switch {
	case err == nil, closedByPeer(err),
		isOneOf(err, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed):
		return ErrConnectionLost
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: it stopped in the middle of a frame: %w", ErrConnectionLost, err)
	}
	return fmt.Errorf("%w: %w", ErrConnectionLost, err)
}

func closedByPeer(err error) bool { return isOneOf(err, syscall.ECONNRESET, syscall.EPIPE) }

func newCall(progress bool) *call {
	waiting := &call{answer: make(chan reply, 1)}
	if progress {
		waiting.progress = make(chan *wire.Progress, 2*maxPendingPhases)
	}
	return waiting
}

// start sends a request in one frame, after the Attach frames that its descriptors need.
func (c *Client) start(ctx context.Context, envelope *wire.Envelope, fds []int,
	waiting *call) error {
	envelope.Request = c.last.Add(1)
	c.mu.Lock()
	if c.connectionEnd || c.closed.Load() {
		c.mu.Unlock()
		return ErrConnectionLost
	}
	c.calls[envelope.Request] = waiting
	c.mu.Unlock()
	attached := 0
	for ; len(fds)-attached > attachedPerFrame; attached += attachedPerFrame {
		attach := envelopeOf(envelope.Request, &wire.Attach{})
		if err := c.send(ctx, attach, fds[attached:attached+attachedPerFrame]); err != nil {
			return c.abandon(envelope.Request, err, attached > 0)
		}
	}
	if deadline, ok := ctx.Deadline(); ok {
		// Rounded up, so that this end's own clock ends the call first.
		ms := math.Ceil(time.Until(deadline).Seconds() * 1000)
		envelope.DeadlineMs = int64(max(1, ms))
	}
	if err := c.send(ctx, envelope, fds[attached:]); err != nil {
		return c.abandon(envelope.Request, err, attached > 0)
	}
	return nil
}

// abandon forgets a call that was not sent, and has the daemon forget its descriptors.
func (c *Client) abandon(number uint64, err error, attached bool) error {
	c.mu.Lock()
	delete(c.calls, number)
	c.mu.Unlock()
	if attached {
		c.sendCancel(number)
	}
	return err
}

func (c *Client) send(ctx context.Context, envelope *wire.Envelope, fds []int) error {
	envelope.Descriptors = uint32(len(fds))
	frame, err := encode(envelope)
	if err != nil {
		return &Error{Class: wire.ErrorClass_BAD_REQUEST,
			Text: "the request cannot be sent: " + err.Error(), Err: err}
	}
	defer putBuffer(frame)
	if err := c.stream.lock(ctx); err != nil {
		return err
	}
	defer c.stream.unlock()
	err = c.stream.write(ctx, *frame, fds, clientWriteTimeout)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && !errors.Is(err, errPartial):
		return ctx.Err() // nothing was sent, the connection is as good as before
	case closedByPeer(err):
		return c.reasonOfEnd(ctx)
	}
	// The stream is unreadable from here. The reader fails all calls; closing twice is harmless.
	_ = c.stream.conn.Close()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return lost(err)
}

// reasonOfEnd waits for the reader, which finds the daemon's last word in what was received before
// the end.
func (c *Client) reasonOfEnd(ctx context.Context) error {
	c.continueReading()
	select {
	case <-c.done:
		return c.reason
	case <-ctx.Done():
		return ctx.Err()
	}
}

// sendCancel gives up a request in the daemon. It does not wait for a daemon that does not read.
func (c *Client) sendCancel(number uint64) {
	ctx, stop := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer stop()
	// A daemon that cannot be notified sees the deadline, or the connection's end.
	_ = c.send(ctx, envelopeOf(number, &wire.Cancel{}), nil)
}

// wait returns the answer to a call. The files are the caller's.
func (c *Client) wait(ctx context.Context, number uint64, waiting *call,
	progress func(*wire.Progress)) (reply, error) {
	c.readOwnAnswer()
	select {
	case r := <-waiting.answer:
		waiting.reportProgress(progress)
		return r, nil
	default:
	}
	silence := time.NewTimer(silenceLimit)
	defer silence.Stop()
	for {
		select {
		case <-silence.C:
			silence.Reset(c.checkAlive(ctx))
		case r := <-waiting.answer:
			waiting.reportProgress(progress)
			return r, nil
		case m := <-waiting.progress:
			progress(m)
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				select {
				case r := <-waiting.answer:
					return r, nil
				case <-time.After(lateLimit):
				}
			}
			c.giveUp(number, waiting)
			return reply{}, ctx.Err()
		case <-c.done:
			select {
			case r := <-waiting.answer: // it came just before the end
				return r, nil
			default:
			}
			return reply{}, c.reason
		}
	}
}

func (waiting *call) reportProgress(progress func(*wire.Progress)) {
	for len(waiting.progress) > 0 {
		progress(<-waiting.progress)
	}
}

// checkAlive asks whether a daemon still lives of which nothing was heard for long, and gives after
// how long to look again. A daemon that was stopped holds its connections open: they are given up
// here.
func (c *Client) checkAlive(ctx context.Context) time.Duration {
	heard := c.heard.Load()
	if quiet := time.Since(c.waiterCount) - time.Duration(heard); quiet < silenceLimit {
		return silenceLimit - quiet
	}
	limited, stop := context.WithTimeout(ctx, aliveInterval)
	defer stop()
	err := c.alive(limited)
	if ctx.Err() == nil && c.heard.Load() == heard && (errors.Is(err, ErrNoDaemon) ||
		errors.Is(err, context.DeadlineExceeded)) {
		c.mute.Store(true)
		// The reader fails all calls; closing twice is harmless.
		_ = c.stream.conn.Close()
	}
	return silenceLimit
}

// giveUp cancels a call, unless it is answered. Its answer comes all the same, and the reader
// closes the descriptors that come with it.
func (c *Client) giveUp(number uint64, waiting *call) {
	c.mu.Lock()
	_, waited := c.calls[number]
	if waited {
		c.calls[number] = nil
	}
	c.mu.Unlock()
	if waited {
		c.sendCancel(number)
	}
	select {
	case r := <-waiting.answer:
		closeFiles(r.files)
	default:
	}
}
