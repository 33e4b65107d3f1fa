package unixsock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// Dialer configures a connection. The zero value does not wait for a daemon to start.
type Dialer struct {
	Name string // for the daemon's log: "epcachectl 0.1.0"
	// Wait is how long to wait for a daemon that is starting: none listens yet, or the previous one
	// stopped answering.
	Wait time.Duration
	// HelloTimeout is for the first answer; 0: 10 s. A restart under socket activation, and a
	// suspended daemon, look like a slow answer.
	HelloTimeout time.Duration
}

// Dial connects to the daemon at path: Dialer{}.Dial.
func Dial(ctx context.Context, path string) (*Client, error) { return Dialer{}.Dial(ctx, path) }

// Dial connects to the daemon at the first of the paths where one listens and this process may
// connect, and exchanges the first frames. The error matches fs.ErrPermission where a path is
// denied and no other one has a daemon, ErrNoDaemon where no daemon listens or answers in time,
// and ErrVersion for a daemon of another protocol.
func (d Dialer) Dial(ctx context.Context, paths ...string) (*Client, error) {
	if len(paths) == 0 {
		paths = DefaultSocket()
	}
	end := time.Now().Add(d.Wait)
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		last := !time.Now().Before(end) // before the try, because this process may not run after it
		client, err := d.dialOnce(ctx, paths)
		// A daemon that was just killed may leave its socket to a child that is being started, so
		// that connections are never accepted until the child closes it.
		if err == nil || !errors.Is(err, ErrNoDaemon) && !ConnectionEnded(err) || last {
			return client, err
		}
		if waitErr := pauseUntil(ctx, min(pause, time.Until(end)), end); ctx.Err() != nil {
			return nil, errors.Join(waitErr, err)
		}
	}
}

// The shortest and longest pause between tries; each is twice the previous one.
const (
	firstPause   = 2 * time.Millisecond
	longestPause = 100 * time.Millisecond
)

func (d Dialer) dialOnce(ctx context.Context, paths []string) (*Client, error) {
	conn, path, err := connectFirst(ctx, paths)
	if err != nil {
		return nil, err
	}
	client, err := d.greet(ctx, conn, path)
	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return client, err
}

func connectFirst(ctx context.Context, paths []string) (*net.UnixConn, string, error) {
	var failed, denied error
	for _, path := range paths {
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "unix", path)
		switch {
		case err == nil:
			return conn.(*net.UnixConn), path, nil
		case notConnected(err):
			failed = errors.Join(failed, noDaemon(path, err))
		case errors.Is(err, syscall.EINVAL): // the kernel's only error for it
			long := fmt.Errorf("the path has %d bytes, more than a socket's path may "+
				"have", len(path))
			failed = errors.Join(failed, noDaemon(path, long))
		case errors.Is(err, fs.ErrPermission):
			// Try the next path, because under sudo HOME may be another user's.
			denied = errors.Join(denied, err)
		default:
			return nil, path, err // the caller's context ended
		}
	}
	return nil, "", cmp.Or(denied, failed)
}

// noDaemon keeps one path's failure to one line.
func noDaemon(path string, cause error) error {
	if errno, is := errors.AsType[*os.SyscallError](cause); is {
		cause = errno.Err
	}
	return fmt.Errorf("%w at %s: %w", ErrNoDaemon, path, cause)
}

func (d Dialer) greet(ctx context.Context, conn *net.UnixConn, path string) (*Client, error) {
	limit := cmp.Or(max(d.HelloTimeout, 0), 10*time.Second)
	stream, err := newStream(conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	stream.late = true
	stop := context.AfterFunc(ctx, func() {
		// Fails only if the connection is closed, which ends the wait as well.
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	reply, err := exchangeHello(stream, d.Name, limit)
	if err == nil {
		err = stream.blockFor(callerReadLimit)
	}
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	if err != nil {
		stream.closeDescriptors()
		if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() == nil {
			err = fmt.Errorf("%w within %v", ErrNoDaemon, limit)
		}
		return nil, errors.Join(err, conn.Close())
	}
	alive := func(ctx context.Context) error {
		c, err := Dialer{Name: d.Name, HelloTimeout: aliveInterval}.Dial(ctx, path)
		if err != nil {
			return err
		}
		return c.Close()
	}
	return &Client{stream: stream, hello: reply, alive: alive, waiterCount: time.Now(),
		done: make(chan struct{}), calls: make(map[uint64]*call)}, nil
}

func exchangeHello(s *stream, name string, limit time.Duration) (*wire.HelloReply, error) {
	if err := s.conn.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return nil, err
	}
	frame, err := encode(envelopeOf(0, &wire.Hello{Version: Version, Client: name}))
	if err != nil {
		return nil, err
	}
	defer putBuffer(frame)
	err = s.write(context.Background(), *frame, nil, limit) // no other goroutine writes yet
	// a daemon that refuses the connection sends the reason before it closes
	if err != nil && !closedByPeer(err) {
		return nil, lost(err)
	}
	payload, at, err := s.frame(0)
	if err != nil {
		return nil, lost(err)
	}
	reply, err := helloReplyOf(s, payload, at)
	if err != nil {
		return nil, err
	}
	return reply, s.conn.SetReadDeadline(time.Time{})
}

func helloReplyOf(s *stream, payload []byte, at int64) (*wire.HelloReply, error) {
	envelope, err := decode(payload)
	if err != nil {
		return nil, err
	}
	fds, err := s.takeDescriptors(at, int(envelope.GetDescriptors()))
	closeAll(fds) // none is expected
	if err != nil {
		return nil, err
	}
	if refusal := envelope.GetError(); refusal != nil {
		return nil, fromWire(refusal)
	}
	reply := envelope.GetHelloReply()
	if reply == nil || envelope.GetRequest() != 0 {
		return nil, violation("the daemon's first frame is not a HelloReply with request number 0")
	}
	if reply.GetVersion() != Version {
		return nil, &Error{Class: wire.ErrorClass_VERSION,
			Text: fmt.Sprintf("the daemon speaks protocol version %d, this client %d",
				reply.GetVersion(), Version)}
	}
	return reply, nil
}

// QuickHelloTimeout is the HelloTimeout for applications that can fall back, too short to be
// noticed.
const QuickHelloTimeout = 50 * time.Millisecond

// ConnectionEnded reports whether a connection ended without a reason, so that the request may be
// repeated on another one. It is false for an error from the daemon or a violation of the protocol.
func ConnectionEnded(err error) bool {
	_, said := errors.AsType[*Error](err)
	return errors.Is(err, ErrConnectionLost) && !said
}
