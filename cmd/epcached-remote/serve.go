package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/epcached/epcached/remote"
)

// idleExit is the time without a connection after which the process ends. The next request starts
// it again.
var idleExit = 60 * time.Second

// maxConnections bounds the calls at the same time; further ones wait.
const maxConnections = 64

// server serves connections until there are no more.
type server struct {
	idle  time.Duration
	calls sync.WaitGroup
	slots chan struct{}
	open  atomic.Int64 // connections
	used  atomic.Int64 // UnixNano when the last one ended

	mu     sync.Mutex // guards the field below
	stores map[remote.Config]*store
}

func newServer(idle time.Duration) *server {
	s := &server{idle: idle, slots: make(chan struct{}, maxConnections),
		stores: make(map[remote.Config]*store)}
	s.used.Store(time.Now().UnixNano())
	return s
}

// serve takes connections from systemd's socket or from descriptor 3.
func serve() error {
	syscall.CloseOnExec(3)
	f := os.NewFile(3, "descriptor 3")
	if os.Getenv("LISTEN_PID") == strconv.Itoa(os.Getpid()) {
		l, err := net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("the socket of systemd: %w", err)
		}
		unix, ok := l.(*net.UnixListener)
		if !ok {
			return errors.New("the socket of systemd is not a Unix socket")
		}
		unix.SetUnlinkOnClose(false) // systemd owns the socket file
		return newServer(idleExit).run(unix.AcceptUnix, unix)
	}
	c, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("descriptor 3: %w: epcached or systemd starts this program", err)
	}
	control, ok := c.(*net.UnixConn)
	if !ok {
		return errors.New("descriptor 3 is not a Unix socket")
	}
	return newServer(idleExit).run(func() (*net.UnixConn, error) {
		return handed(control)
	}, control)
}

// handed returns the next connection that the daemon passes.
func handed(control *net.UnixConn) (*net.UnixConn, error) {
	files, err := remote.Receive(control, new(struct{}))
	defer remote.CloseAll(files)
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		return nil, fmt.Errorf("%d descriptors, not a connection", len(files))
	}
	c, err := net.FileConn(files[0])
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(errors.New("not a Unix socket"), c.Close())
	}
	return conn, nil
}

// run serves until accept fails, which it does when the daemon ends or the process was idle. It
// returns after the last call.
func (s *server) run(accept func() (*net.UnixConn, error), from io.Closer) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var idle atomic.Bool
	go func() {
		tick := time.NewTicker(max(s.idle/8, time.Millisecond))
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-tick.C:
				if s.open.Load() == 0 && now.UnixNano()-s.used.Load() > int64(s.idle) {
					idle.Store(true)
					// ends accept; a client that connects just now starts another process
					_ = from.Close()
					return
				}
			}
		}
	}()
	for {
		conn, err := accept()
		if err != nil {
			cancel()
			s.calls.Wait()
			if idle.Load() || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		s.open.Add(1)
		s.calls.Go(func() {
			defer func() {
				_ = conn.Close()
				s.used.Store(time.Now().UnixNano())
				s.open.Add(-1)
			}()
			s.slots <- struct{}{}
			defer func() { <-s.slots }()
			if err := s.answer(ctx, conn); err != nil {
				report(os.Stderr, err)
			}
		})
	}
}

// requestTimeout bounds how long a request takes to arrive.
const requestTimeout = 10 * time.Second

// answer answers the request of one connection.
func (s *server) answer(ctx context.Context, conn *net.UnixConn) error {
	if err := conn.SetReadDeadline(time.Now().Add(requestTimeout)); err != nil {
		return err
	}
	var r remote.Request
	files, err := remote.Receive(conn, &r)
	defer remote.CloseAll(files)
	switch {
	case errors.Is(err, io.EOF):
		return nil // the client closed the connection
	case err != nil:
		return err
	case r.Version != remote.Version:
		return fmt.Errorf("a request of version %d, not %d", r.Version, remote.Version)
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if r.Budget > 0 {
		ctx, cancel = context.WithTimeout(ctx, r.Budget)
		defer cancel()
	}
	go func() { // reads until the client closes the connection, which cancels the call
		_, _ = conn.Read(make([]byte, 1))
		cancel()
	}()
	var sending sync.Mutex
	send := func(a *remote.Answer) error {
		sending.Lock()
		defer sending.Unlock()
		return remote.Send(conn, a, nil)
	}
	c := &call{request: &r, files: files, progress: func(p remote.Progress) {
		// ignored, because the goroutine above notices a closed connection
		_ = send(&remote.Answer{Progress: &p})
	}}
	a := s.do(withCall(ctx, c), c)
	a.Wire = c.wire()
	// close them before the answer, because the daemon copies files that are still writable
	remote.CloseAll(files)
	if err := send(a); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// call is a request with the counts of its bytes so far.
type call struct {
	request    *remote.Request
	files      []*os.File
	progress   func(remote.Progress)
	in, out    atomic.Int64
	requests   atomic.Int64
	retryAfter atomic.Int64 // nanoseconds
}

func (c *call) wire() remote.Wire {
	return remote.Wire{In: c.in.Load(), Out: c.out.Load(), Requests: int(c.requests.Load())}
}

type callKey struct{}

func withCall(ctx context.Context, c *call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

// callOf returns the call that a context belongs to.
func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

func (s *server) do(ctx context.Context, c *call) *remote.Answer {
	st, err := s.store(c.request.Remote)
	a := new(remote.Answer)
	if err == nil {
		err = st.do(ctx, c, a)
	}
	if err == nil {
		return a
	}
	e := classify(err)
	e.Remote, e.RetryAfter = c.request.Remote.Name, time.Duration(c.retryAfter.Load())
	if e.Class == "refused" {
		s.forget(c.request.Remote) // the next call reads the credentials again
	}
	return &remote.Answer{Err: e, Check: a.Check}
}

// store returns the remote of a configuration.
func (s *server) store(c remote.Config) (*store, error) {
	if err := c.Check(); err != nil {
		return nil, &remote.Error{Class: "unsupported", Text: err.Error()}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.stores[c]; st != nil {
		return st, nil
	}
	st, err := newStore(c)
	if err == nil {
		s.stores[c] = st
	}
	return st, err
}

func (s *server) forget(c remote.Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.stores, c)
}
