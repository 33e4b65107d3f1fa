package conformance

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// daemon plays one row. The steps of a connection are, by step.Do:
//
//	hello     read a Hello and answer it
//	read      read any frame
//	acquire   read frames up to an Acquire; jobs: up to a Jobs
//	send      send Envelope; an envelope without a request number gets that of the last request
//	hit       send an AcquireReply with the view, changed by With
//	raw       send Hex
//	pause     wait for Ms
//	drain     read until the client closes
//	stop      neither read nor close until the row is over
//
// A connection is closed behind its last step.
type daemon struct {
	t        *testing.T
	row      row
	path     string
	view     string
	file     string
	listener *net.UnixListener
	over     chan struct{}
	done     sync.WaitGroup

	mu          sync.Mutex
	connections int
	open        []*net.UnixConn
	failed      error
}

// The graph of every view, and its BLAKE3 digest.
const (
	graphContent  = "compiled"
	digestOfGraph = "0a1c9344b835c6d495d9c0373e619936990f97b18cb8ba615b5344adf724a5e5"
)

func startDaemon(t *testing.T, r row) *daemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "conf") // the test's own is too long for a socket
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &daemon{t: t, row: r, path: filepath.Join(dir, "s"),
		view: filepath.Join(dir, "view"), file: filepath.Join(dir, "model.onnx"),
		over: make(chan struct{})}
	require.NoError(t, os.MkdirAll(filepath.Join(d.view, "abc"), 0o755))
	require.NoError(t,
		os.WriteFile(filepath.Join(d.view, "abc", "x_ctx.onnx"), []byte(graphContent), 0o644))
	require.NoError(t, os.WriteFile(d.file, []byte("no client looks into a model"), 0o644))
	require.NoError(t,
		os.WriteFile(filepath.Join(dir, "weights"), []byte("external data"), 0o644))
	d.listen()
	return d
}

func (d *daemon) listen() {
	address := &net.UnixAddr{Name: d.path, Net: "unix"}
	switch d.row.Listen {
	case "none":
		return
	case "not a socket":
		require.NoError(d.t, os.WriteFile(d.path, nil, 0o666))
		return
	case "refused", "full", "stopped":
		d.listenRaw(d.row.Listen)
		return
	}
	var err error
	d.listener, err = net.ListenUnix("unix", address)
	require.NoError(d.t, err)
	d.done.Go(d.accept)
}

// listenRaw makes a socket where connections are never accepted: one that a daemon left behind, or
// that of one that was stopped.
func (d *daemon) listenRaw(how string) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(d.t, err)
	d.t.Cleanup(func() { unix.Close(fd) })
	require.NoError(d.t, unix.Bind(fd, &unix.SockaddrUnix{Name: d.path}))
	if how == "refused" {
		return
	}
	require.NoError(d.t, unix.Listen(fd, 0))
	if how == "full" {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: d.path, Net: "unix"})
		require.NoError(d.t, err)
		d.t.Cleanup(func() { conn.Close() })
	}
}

func (d *daemon) accept() {
	for {
		conn, err := d.listener.AcceptUnix()
		if err != nil {
			return // the row is over
		}
		d.mu.Lock()
		steps := d.row.Connections[min(d.connections, len(d.row.Connections)-1)]
		d.connections++
		d.open = append(d.open, conn)
		d.mu.Unlock()
		d.done.Go(func() { d.serve(conn, steps) })
	}
}

func (d *daemon) serve(conn *net.UnixConn, steps []step) {
	p := &peer{daemon: d, conn: conn}
	defer conn.Close()
	for i := range steps {
		err := p.step(&steps[i])
		switch {
		case err == nil:
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
			errors.Is(err, net.ErrClosed), errors.Is(err, unix.EPIPE),
			errors.Is(err, unix.ECONNRESET):
			return // the client went away: what it made of that is seen there
		default:
			d.mu.Lock()
			d.failed = errors.Join(d.failed, fmt.Errorf("step %d: %w", i, err))
			d.mu.Unlock()
			return
		}
	}
}

// stop ends the row, and gives the number of connections that were made.
func (d *daemon) stop() int {
	close(d.over)
	if d.listener != nil {
		d.listener.Close()
	}
	d.mu.Lock()
	for _, conn := range d.open {
		conn.Close()
	}
	d.mu.Unlock()
	d.done.Wait()
	require.NoError(d.t, d.failed)
	return d.connections
}

// peer is the daemon's end of one connection.
type peer struct {
	daemon *daemon
	conn   *net.UnixConn
	number uint64 // of the last request
}

func (p *peer) step(s *step) error {
	switch s.Do {
	case "hello":
		if e, err := p.read(); err != nil || e.GetHello() == nil {
			return errors.Join(err, badStep(err == nil, "the first frame is no Hello"))
		}
		reply := &wire.HelloReply{Version: 1, Server: "scripted", Scope: "uid:0"}
		return p.send(s,
			&wire.Envelope{Descriptors: uint32(len(s.paths(p.daemon))),
				Body: &wire.Envelope_HelloReply{HelloReply: reply}})
	case "read":
		_, err := p.read()
		return err
	case "acquire", "jobs":
		return p.readRequest(s.Do)
	case "send", "hit":
		return p.sendMany(s)
	case "raw":
		data, err := hex.DecodeString(s.Hex)
		if err == nil {
			_, err = p.conn.Write(data)
		}
		return err
	case "pause":
		p.wait(time.Duration(s.Ms) * time.Millisecond)
		return nil
	case "drain":
		_, err := io.Copy(io.Discard, p.conn)
		return err
	case "stop":
		p.wait(time.Hour)
		return nil
	}
	return fmt.Errorf("there is no step %q", s.Do)
}

func badStep(is bool, text string) error {
	if is {
		return errors.New(text)
	}
	return nil
}

func (p *peer) wait(d time.Duration) {
	select {
	case <-time.After(d):
	case <-p.daemon.over:
	}
}

// read closes what descriptors come: the kernel drops those that are not received.
func (p *peer) read() (*wire.Envelope, error) {
	header := make([]byte, 4)
	if _, err := io.ReadFull(p.conn, header); err != nil {
		return nil, err
	}
	payload := make([]byte, min(binary.LittleEndian.Uint32(header), 1<<20))
	if _, err := io.ReadFull(p.conn, payload); err != nil {
		return nil, err
	}
	e := new(wire.Envelope)
	err := proto.Unmarshal(payload, e)
	p.number = e.GetRequest()
	return e, err
}

func (p *peer) readRequest(what string) error {
	for {
		e, err := p.read()
		switch {
		case err != nil:
			return err
		case what == "acquire" && e.GetAcquire() != nil &&
			e.GetAcquire().GetAdopt() != p.daemon.row.Adopt:
			return fmt.Errorf("the client's Acquire has adopt = %v, not %v", !p.daemon.row.Adopt,
				p.daemon.row.Adopt)
		case what == "acquire" && e.GetAcquire() != nil, what == "jobs" && e.GetJobs() != nil:
			return nil
		case e.GetAttach() == nil && e.GetCancel() == nil:
			return fmt.Errorf("the client sent %T in place of %s", e.GetBody(), what)
		}
	}
}

func (p *peer) sendMany(s *step) error {
	times := max(1, s.Times)
	if len(s.Fds) > 0 {
		times = 1
	}
	for range times {
		e, err := p.daemon.envelope(s)
		if err != nil {
			return err
		}
		if _, said := s.Envelope["request"]; !said {
			e.Request = p.number
		}
		if s.Number != nil {
			e.Request = *s.Number
		}
		if err := p.send(s, e); err != nil {
			return err
		}
	}
	return nil
}

// envelope makes what a step sends, but for its request number.
func (d *daemon) envelope(s *step) (*wire.Envelope, error) {
	content := s.Envelope
	if s.Do == "hit" {
		reply := map[string]any{"outcome": "hit", "request_key": "a1", "build": "b2",
			"model_digest": "c3", "ep": "E", "compatibility": "optimal",
			"why": "it is there", "fd": 0, "view": "/views/of/nobody", "graph": "abc/x_ctx.onnx",
			"compile_seconds": 1.5,
			"files": []any{map[string]any{"name": "abc/x_ctx.onnx",
				"size": len(graphContent), "digest": digestOfGraph}}}
		maps.Copy(reply, s.With)
		maps.DeleteFunc(reply, func(_ string, v any) bool { return v == nil })
		content = map[string]any{"acquire_reply": reply}
	}
	data, err := json.Marshal(content)
	e := new(wire.Envelope)
	if err == nil {
		err = protojson.Unmarshal(data, e)
	}
	if _, said := content["descriptors"]; !said {
		e.Descriptors = uint32(len(s.paths(d)))
	}
	if s.Announce != nil {
		e.Descriptors = uint32(*s.Announce)
	}
	return e, err
}

// paths lists what travels with the frame: a hit has the view.
func (s *step) paths(d *daemon) []string {
	names := s.Fds
	if s.Do == "hit" && names == nil {
		names = []string{"view"}
	}
	var out []string
	for range max(1, s.Times) {
		for _, name := range names {
			out = append(out, map[string]string{"view": d.view, "file": d.file}[name])
		}
	}
	return out
}

// frame returns the bytes that a step sends of an envelope.
func (s *step) frame(e *wire.Envelope) ([]byte, error) {
	payload, err := proto.Marshal(e)
	if err != nil {
		return nil, err
	}
	extra, err := hex.DecodeString(s.Extra)
	payload = append(payload, extra...)
	length := uint32(len(payload))
	if s.Length != nil {
		length = *s.Length
	}
	data := append(binary.LittleEndian.AppendUint32(nil, length), payload...)
	if s.Cut != nil && *s.Cut < 0 {
		return data[:len(data)+*s.Cut], err
	}
	if s.Cut != nil {
		return data[:*s.Cut], err
	}
	return data, err
}

func (p *peer) send(s *step, e *wire.Envelope) error {
	data, err := s.frame(e)
	if err != nil || len(data) == 0 {
		return err
	}
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	for _, path := range s.paths(p.daemon) {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		fds = append(fds, fd)
	}
	if s.FdsAt > 0 && s.FdsAt < len(data) {
		if _, err := p.conn.Write(data[:s.FdsAt]); err != nil {
			return err
		}
		p.wait(20 * time.Millisecond) // or the kernel puts both into one
		data = data[s.FdsAt:]
	}
	if s.Every > 0 {
		return p.dribble(data, time.Duration(s.Every)*time.Millisecond)
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	n, _, err := p.conn.WriteMsgUnix(data, oob, nil)
	if err == nil && n < len(data) {
		_, err = p.conn.Write(data[n:])
	}
	return err
}

func (p *peer) dribble(data []byte, pause time.Duration) error {
	for i := range data {
		if _, err := p.conn.Write(data[i : i+1]); err != nil {
			return err
		}
		p.wait(pause)
	}
	return nil
}
