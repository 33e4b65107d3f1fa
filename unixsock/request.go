package unixsock

import (
	"context"
	"fmt"
	"os"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// request is a request that is being answered or, while cancel is nil, one whose descriptors arrive
// ahead of it.
type request struct {
	number  uint64
	bytes   int64
	body    string     // as Files.Body
	fds     []int      // nil: files has them
	files   []*os.File // fds as files, which the backend uses until the answer is sent
	checked bool       // fds are regular files
	slow    bool       // one of them is on a file system that may never answer
	arrived time.Time
	ctx     context.Context
	cancel  context.CancelFunc
}

// receive reads and handles one frame. An error ends the connection. mine is false when another
// goroutine has taken over the reading.
func (c *connection) receive() (mine bool, err error) {
	if err := c.tooSlow(closeLimitFactor); err != nil {
		return true, err
	}
	if !c.stream.bufferEmpty() {
		c.takeReadSlot()
	}
	envelope, fds, payload, err := c.stream.envelope(c.server.limits.FrameTimeout)
	if err != nil {
		return true, err
	}
	number := envelope.GetRequest()
	if number == 0 {
		c.closeAll(fds)
		return true, violation("request number 0")
	}
	switch body := envelope.GetBody().(type) {
	case *wire.Envelope_Cancel:
		c.closeAll(fds)
		c.cancelRequest(number)
		return true, nil
	case *wire.Envelope_Attach:
		return true, c.attach(number, fds)
	case *wire.Envelope_Acquire:
		return c.begin(envelope, body.Acquire, fds, payload)
	case *wire.Envelope_Put:
		return c.begin(envelope, body.Put, fds, payload)
	case *wire.Envelope_Import:
		return c.begin(envelope, body.Import, fds, payload)
	default:
		c.closeAll(fds)
		if len(fds) > 0 {
			return true, violation("descriptors with a request that takes none")
		}
		return c.begin(envelope, bodyOf(envelope), nil, payload)
	}
}

// cancelRequest ignores an unknown number, because the answer may already be on its way.
func (c *connection) cancelRequest(number uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch r := c.requests[number]; {
	case r == nil:
	case r.cancel != nil:
		r.cancel()
	default:
		delete(c.requests, number)
		c.discard(r)
	}
}

func (c *connection) cancelRequests() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.requests {
		if r.cancel != nil {
			r.cancel()
		}
	}
}

// attach keeps descriptors for the Acquire, Put or Import that follows.
func (c *connection) attach(number uint64, fds []int) error {
	c.user.used.Store(time.Now().UnixNano())
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.requests[number]
	switch {
	case r != nil && r.cancel != nil:
		c.closeAll(fds)
		return violation("descriptors arrived for request %d, which is already being answered",
			number)
	case r == nil && len(c.requests) >= c.server.limits.Requests:
		c.closeAll(fds)
		return violation("descriptors for more than %d requests", c.server.limits.Requests)
	case r == nil:
		r = &request{number: number}
		c.requests[number] = r
	}
	if len(r.fds)+len(fds) > MaxAttached {
		c.closeAll(fds)
		return violation("more than %d descriptors for one request", MaxAttached)
	}
	if held := c.user.descriptors.Add(int64(len(fds))); held >
		int64(c.server.limits.DescriptorsPerUID) {
		c.user.descriptors.Add(-int64(len(fds)))
		c.closeAll(fds)
		return &Error{Class: wire.ErrorClass_BUSY, Text: "too many descriptors of one user"}
	}
	r.fds = append(r.fds, fds...)
	return nil
}

// begin starts a request, or refuses it if the client exceeds a limit.
func (c *connection) begin(envelope *wire.Envelope, message proto.Message, fds []int,
	payload []byte) (mine bool, err error) {
	number := envelope.GetRequest()
	c.mu.Lock()
	r := c.requests[number]
	if r != nil && r.cancel != nil {
		c.mu.Unlock()
		c.closeAll(fds)
		return true, violation("request number %d was used again before its answer", number)
	}
	if r == nil {
		r = &request{number: number}
		c.requests[number] = r
	}
	r.arrived, r.bytes = time.Now(), int64(len(payload)+requestBytes)
	c.used.Store(r.arrived.UnixNano())
	c.user.used.Store(r.arrived.UnixNano())
	r.fds = append(r.fds, fds...)
	r.ctx, r.cancel = c.requestContext(envelope)
	c.mu.Unlock()

	c.user.descriptors.Add(int64(len(fds)))
	var inline *connection
	_, acquire := message.(*wire.Acquire)
	if acquire {
		if len(payload) <= maxBody {
			r.body = string(wire.Body(payload))
		}
		if c.stream.bufferEmpty() {
			inline = c
		}
	}
	c.endReadSlot()
	slot := c.user.slots.take(c.ctx, inline)
	c.server.overseer.wakeUp()
	if !acquire {
		c.server.overseer.expectSlow()
	}
	err = c.overLimits(r)
	if err == nil && message == nil {
		err = &Error{Class: wire.ErrorClass_VERSION, Text: "this daemon does not know the request",
			Hint: "a newer daemon may"}
	}
	c.handlers.Add(1)
	switch {
	case err != nil:
		err = c.answer(r, toWire(err), nil)
		c.handlers.Done()
	case inline != nil:
		c.handle(r, message)
	default:
		// asynchronously, because the next request must not wait for a slow one
		go func() {
			c.handle(r, message)
			c.user.slots.end(slot)
		}()
		return true, nil
	}
	if c.user.slots.end(slot) || inline == nil {
		return true, err
	}
	return false, nil // another goroutine reads, and gets the error
}

// requestContext returns a context with the request's deadline; of the two for Acquire the earlier
// one.
func (c *connection) requestContext(envelope *wire.Envelope) (context.Context, context.CancelFunc) {
	limit := envelope.GetDeadlineMs()
	if own := envelope.GetAcquire().GetDeadlineMs(); own != 0 && (limit == 0 || own < limit) {
		limit = own
	}
	const longest = int64(1<<63-1) / int64(time.Millisecond)
	if limit == 0 || limit > longest {
		return context.WithCancel(c.ctx)
	}
	return context.WithTimeout(c.ctx, time.Duration(limit)*time.Millisecond)
}

// overLimits counts the request, and returns an error if it exceeds a limit.
func (c *connection) overLimits(r *request) error {
	limits := &c.server.limits
	flying := c.inFlight.Add(1)
	held := c.user.requestBytes.Add(r.bytes)
	busy := func(format string, args ...any) error {
		return &Error{Class: wire.ErrorClass_BUSY, Text: fmt.Sprintf(format, args...),
			Hint: "wait for answers before sending more requests"}
	}
	switch {
	case c.server.refused() != nil:
		return c.server.refused()
	case c.server.draining():
		return &Error{Class: wire.ErrorClass_BUSY, Text: "the daemon is stopping"}
	case flying > int64(limits.Requests):
		return busy("more than %d requests at once on one connection", limits.Requests)
	case held > int64(limits.RequestBytesPerUID):
		return busy("requests of more than %d bytes at once", limits.RequestBytesPerUID)
	case len(r.fds) > MaxAttached:
		return descriptorRefusal("more than %d descriptors for one request", MaxAttached)
	case len(r.fds) > 0 && c.user.descriptors.Load() > int64(limits.DescriptorsPerUID):
		return busy("more than %d descriptors of this user at the same "+
			"time", limits.DescriptorsPerUID)
	}
	return nil
}

// finish ends a request before its answer is sent: from then on the client may use its number
// again.
func (c *connection) finish(r *request) {
	r.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.requests, r.number)
}

// discard closes the request's descriptors, and releases its charges.
func (c *connection) discard(r *request) {
	held := len(r.fds) + len(r.files)
	end := func() {
		closeAll(r.fds)
		closeFiles(r.files)
		c.user.descriptors.Add(-int64(held))
	}
	switch {
	case r.slow:
		c.endSlow(end)
	case r.checked:
		end()
	default:
		c.closeAll(r.fds)
		c.user.descriptors.Add(-int64(held))
	}
}

// closeAttached closes descriptors of requests that never followed.
func (c *connection) closeAttached() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for number, r := range c.requests {
		delete(c.requests, number)
		c.discard(r)
	}
}
