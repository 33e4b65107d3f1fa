package unixsock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// connection is the daemon's end of a connection. One goroutine at a time reads: see
// requestslots.go.
type connection struct {
	server   *Server
	stream   *stream
	peer     Peer
	user     *user
	account  account
	released bool         // no longer counted in Server.total; guarded by Server.mu
	used     atomic.Int64 // UnixNano of its last request, or of its beginning

	ended chan error // why reading ended; buffered
	reads heldSlot   // slot for reading the next frame; used by the reading goroutine

	ctx      context.Context // cancels the requests
	cancel   context.CancelFunc
	inFlight atomic.Int64   // requests without a sent answer
	handlers sync.WaitGroup // their goroutines
	// unread counts answers with descriptors since the peer was last known to have read everything.
	unread atomic.Int64

	subscriptions atomic.Int64

	mu       sync.Mutex
	requests map[uint64]*request  // being answered, or waiting for descriptors
	claims   map[string]time.Time // ends of the claims that its client holds
}

func (s *Server) newConnection(accepted net.Conn) (*connection, error) {
	conn, ok := accepted.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("a %s connection: only Unix sockets carry descriptors",
			accepted.LocalAddr().Network())
	}
	peer, err := peerOf(conn)
	if err != nil {
		return nil, err
	}
	stream, err := newStream(conn)
	if err != nil {
		return nil, err
	}
	c := &connection{server: s, stream: stream, peer: peer, ended: make(chan error, 1),
		requests: make(map[uint64]*request)}
	c.ctx, c.cancel = context.WithCancel(s.base)
	c.peer.Connection = c.ctx
	return c, nil
}

// refuse notifies a client that it is not served, unless that would block.
func (c *connection) refuse(err error) {
	c.cancel()
	// The client sees the connection close either way.
	_ = c.send(c.ctx, envelopeOf(0, toWire(err)), nil)
	c.closeSilently()
}

// closeSilently closes a connection without a reason, so that the client may find or start another
// daemon.
func (c *connection) closeSilently() {
	c.cancel()
	c.stream.closeDescriptors()
	_ = c.stream.conn.Close()
}

// serve reads until the connection ends, and returns after its last request.
func (c *connection) serve() {
	wake := context.AfterFunc(c.ctx, func() {
		// Wakes the reader, and writers that wait for buffer space; fails only if the connection is
		// closed already.
		_ = c.stream.conn.SetDeadline(time.Unix(1, 0))
	})
	defer wake()
	c.stream.closing = c.closeAll
	c.stream.beforeRead, c.stream.nothingRead = c.takeReadSlot, c.endReadSlot
	if err := c.hello(); err != nil {
		c.stopReading(c.sendViolation(err))
	} else {
		c.continueReading()
	}
	err := <-c.ended
	c.handlers.Wait()
	c.closeAttached()
	c.stream.closeDescriptors()
	c.user.frameBytes.Add(-int64(c.stream.charged))
	if err != nil && !errors.Is(err, io.EOF) && c.server.base.Err() == nil {
		c.server.Log.Info("connection ended", "uid", c.peer.UID, "pid", c.peer.PID, "error", err)
	}
}

// chargeFrames bounds the memory of one user's unfinished frames.
func (c *connection) chargeFrames(bytes int) error {
	if c.user.frameBytes.Add(int64(bytes)) > int64(c.server.limits.FrameBytesPerUID) && bytes > 0 {
		c.user.frameBytes.Add(-int64(bytes))
		return busy(fmt.Sprintf("the large frames of this user that are arriving take more than "+
			"%d bytes",
			c.server.limits.FrameBytesPerUID), "send fewer of them at the same time")
	}
	return nil
}

// idle reports whether the connection may be closed without harm, because its client waits for no
// answer and holds no claim. Descriptors without a request do not count.
func (c *connection) idle(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.requests {
		if r.cancel != nil {
			return false
		}
	}
	for _, end := range c.claims {
		if end.After(now) {
			return false
		}
	}
	return c.inFlight.Load() == 0 && !c.released
}

// addClaim records a claim that ends with the connection.
func (c *connection) addClaim(claim *wire.Claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.claims == nil {
		c.claims = make(map[string]time.Time)
	}
	c.claims[claim.GetId()] = time.Now().
		Add(time.Duration(claim.GetDeadlineMs()) * time.Millisecond)
}

func (c *connection) removeClaim(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.claims, id)
}

func (c *connection) continueReading() {
	// Checked each time, because the end of a frame resets the deadline that would have woken the
	// reader.
	for c.ctx.Err() == nil {
		mine, err := c.receive()
		if err != nil {
			c.stopReading(c.sendViolation(err))
			return
		}
		if !mine {
			return
		}
		c.endReadSlot()
	}
	c.stopReading(nil)
}

// takeReadSlot waits for a slot to read the next frame in, unless the connection has one. Without
// slots, a user with hundreds of connections would delay other users, because the Go scheduler is
// fair to goroutines and not to users.
func (c *connection) takeReadSlot() {
	if c.reads.requestSlot == nil {
		c.reads = c.user.slots.take(c.ctx, nil)
	}
}

func (c *connection) endReadSlot() {
	c.user.slots.end(c.reads)
	c.reads = heldSlot{}
}

// stopReading cancels all requests, because their answers cannot be sent or read any more.
func (c *connection) stopReading(err error) {
	c.endReadSlot()
	c.cancel()
	c.ended <- err
}

// sendViolation tells the client which rule it broke.
func (c *connection) sendViolation(err error) error {
	if e, is := errors.AsType[*Error](err); is && c.ctx.Err() == nil {
		return errors.Join(err, c.send(c.ctx, envelopeOf(0, toWire(e)), nil))
	}
	return err
}

func (c *connection) hello() error {
	limit := c.server.limits.HelloTimeout
	if err := c.stream.conn.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	envelope, fds, _, err := c.stream.envelope(0)
	if err != nil {
		return err
	}
	if len(fds) > 0 {
		c.closeAll(fds)
		return violation("descriptors with the first frame")
	}
	hello := envelope.GetHello()
	if hello == nil || envelope.GetRequest() != 0 {
		return violation("the first frame must be Hello, under request number 0")
	}
	if hello.GetVersion() < Version {
		return &Error{Class: wire.ErrorClass_VERSION, Text: fmt.Sprintf("protocol version %d is "+
			"not supported; %d is", hello.GetVersion(), Version)}
	}
	if err := c.awaitPace(); err != nil {
		return err
	}
	if err := c.send(c.ctx, envelopeOf(0, c.helloReply(hello)), nil); err != nil {
		return err
	}
	return c.stream.conn.SetReadDeadline(time.Time{})
}

// awaitPace delays the answer to a Hello while other users are served, because a user that connects
// again and again would keep the accept loop and the processors busy for all.
func (c *connection) awaitPace() error {
	if !c.server.crowded.Load() {
		return nil
	}
	limits := &c.server.limits
	wait := c.user.hellos.wait(time.Now(), limits.HelloInterval, limits.HelloBurst)
	if wait == 0 {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-c.ctx.Done():
		return context.Cause(c.ctx)
	}
}

func (c *connection) helloReply(hello *wire.Hello) *wire.HelloReply {
	reply := cmp.Or(c.server.Backend.Hello(c.peer, hello), &wire.HelloReply{})
	reply.Version, reply.Server = cmp.Or(reply.Version, Version),
		cmp.Or(reply.Server, c.server.Name)
	reply.Uid, reply.DaemonUid = c.peer.UID, uint32(max(0, os.Geteuid()))
	return reply
}
