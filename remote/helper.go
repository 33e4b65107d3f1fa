package remote

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"time"
)

// After a crash the helper is started again after a second, doubled each time.
const (
	backoffFirst   = time.Second
	backoffLongest = time.Minute
)

// errHelper says that the helper ended before it answered.
var errHelper = errors.New("epcached-remote ended without an answer")

// helper starts the process, or connects to its unit.
type helper struct {
	opts Options
	now  func() time.Time

	mu      sync.Mutex // guards the fields below
	closed  bool
	running *process  // nil: not running
	crashes int       // in a row
	notYet  time.Time // when it may be started again
}

// process is a started helper process.
type process struct {
	*os.Process
	control *net.UnixConn // passes connections to it
	ended   chan struct{} // closed when its end is recorded
}

// endTimeout is the time that a process has to end by itself.
const endTimeout = 2 * time.Second

// end ends a process, and returns when it has.
func (p *process) end() {
	_ = p.control.Close() // which ends the process
	select {
	case <-p.ended:
	case <-time.After(endTimeout):
		_ = p.Kill() // it may have ended just now
		<-p.ended
	}
}

func newHelper(opts Options) *helper { return &helper{opts: opts, now: time.Now} }

// call sends a request and reads the answers. If the helper ended because it was idle just when the
// request came, it is started again.
func (h *helper) call(ctx context.Context, r *Request, files []*os.File,
	progress func(Progress)) (*Answer, error) {
	for attempt := 0; ; attempt++ {
		conn, err := h.connect(ctx)
		if err != nil {
			return nil, err
		}
		a, began, err := converse(ctx, conn, r, files, progress)
		if err == nil || began || attempt > 0 || ctx.Err() != nil {
			return a, err
		}
		h.settle(ctx)
	}
}

// settle waits until the end of a process that closed a connection is recorded.
func (h *helper) settle(ctx context.Context) {
	h.mu.Lock()
	running := h.running
	h.mu.Unlock()
	if running == nil {
		return
	}
	select {
	case <-running.ended:
	case <-ctx.Done():
	case <-time.After(200 * time.Millisecond): // it is running, and only this call failed
	}
}

func converse(ctx context.Context, conn *net.UnixConn, r *Request, files []*os.File,
	progress func(Progress)) (_ *Answer, began bool, err error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		stop()
		_ = conn.Close() // cancels the call in the helper
	}()
	if err := Send(conn, r, files); err != nil {
		return nil, false, fmt.Errorf("epcached-remote: %w", err)
	}
	for {
		a := new(Answer)
		got, err := Receive(conn, a)
		CloseAll(got) // none is expected
		switch {
		case errors.Is(err, io.EOF):
			return nil, began, errHelper
		case err != nil:
			return nil, began, fmt.Errorf("epcached-remote: %w", err)
		}
		began = true
		if a.Progress == nil {
			return a, true, nil
		}
		if progress != nil {
			progress(*a.Progress)
		}
	}
}

// connect returns a new connection to the helper.
func (h *helper) connect(ctx context.Context) (*net.UnixConn, error) {
	if h.opts.Socket != "" {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", h.opts.Socket)
		if err != nil {
			return nil, err
		}
		return conn.(*net.UnixConn), nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		fresh := h.running == nil
		if fresh {
			if err := h.start(); err != nil {
				return nil, err
			}
		}
		ours, theirs, err := Pair()
		if err != nil {
			return nil, err
		}
		err = Send(h.running.control, struct{}{}, []*os.File{theirs})
		_ = theirs.Close() // the helper has its own
		if err == nil {
			return ours, nil
		}
		_ = ours.Close()
		running := h.running
		h.mu.Unlock()
		running.end()
		h.mu.Lock()
		if fresh {
			return nil, fmt.Errorf("epcached-remote: %w", err)
		}
	}
}

// start starts the process. The caller holds the lock.
func (h *helper) start() error {
	if h.closed {
		return net.ErrClosed
	}
	if wait := h.notYet.Sub(h.now()); wait > 0 {
		return fmt.Errorf("epcached-remote crashed %d times: it is started again in %v", h.crashes,
			wait.Round(time.Millisecond))
	}
	control, theirs, err := Pair()
	if err != nil {
		return err
	}
	defer theirs.Close()
	cmd := exec.Command(h.opts.Program, "serve")
	cmd.Env, cmd.Dir, cmd.ExtraFiles = h.opts.Env, "/", []*os.File{theirs}
	stderr, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		h.failed()
		return errors.Join(err, control.Close())
	}
	h.running = &process{cmd.Process, control, make(chan struct{})}
	go h.wait(cmd, stderr, h.running)
	return nil
}

// wait logs the output of the process, and records its end.
func (h *helper) wait(cmd *exec.Cmd, stderr io.Reader, p *process) {
	defer close(p.ended)
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		h.opts.Log.Warn("epcached-remote", "line", lines.Text())
	}
	// A line that is too long ends the scanner, but must not block the process.
	_, _ = io.Copy(io.Discard, stderr)
	err := cmd.Wait()
	_ = p.control.Close()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.running == p {
		h.running = nil
	}
	switch {
	case err == nil:
		h.crashes = 0
	case !h.closed:
		h.failed()
		h.opts.Log.Warn("epcached-remote crashed", "error", err, "times", h.crashes)
	}
}

func (h *helper) failed() {
	wait := min(backoffFirst<<min(h.crashes, 10), backoffLongest)
	h.crashes++
	h.notYet = h.now().Add(wait)
}

// close ends the process, and returns when it has.
func (h *helper) close() error {
	h.mu.Lock()
	h.closed = true
	running := h.running
	h.mu.Unlock()
	if running != nil {
		running.end()
	}
	return nil
}
