package unixsock

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// batch has the descriptors of one recvmsg. The kernel ends a read after the data that carried
// them, but may return earlier data before, so their frame begins within [first, last).
type batch struct {
	first, last int64 // offsets in the stream
	fds         []int
}

// stream sends and receives frames. One goroutine may read and any number write at a time.
type stream struct {
	conn *net.UnixConn
	raw  syscall.RawConn

	// Used by the reader. buf[start:end] has arrived and is not consumed; offset is that of
	// buf[start].
	buf        []byte
	start, end int
	offset     int64
	// at most two: of an incomplete frame, and of the one after it
	batches []batch
	// oob has space for MaxDescriptors. The kernel closes further ones, and reports that.
	oob       [272]byte
	recv      func(fd uintptr) bool
	readBytes int
	readOOB   int
	readFlags int
	readErr   error
	// fail with EAGAIN when the receive timeout for the first bytes of a frame is over
	deadlineSet bool
	// charge is called when large buffers grow and are released; may be nil.
	charge  func(bytes int) error
	charged int         // bytes charged
	closing func([]int) // closes descriptors that no frame names
	// read what has come after a deadline, because this process may not have run
	late bool
	// called before each attempt to read, and after one without data
	beforeRead, nothingRead func()

	writing chan struct{} // a lock with cancellation; guards the fields below
	send    func(fd uintptr) bool
	out     []byte
	outOOB  []byte
	outErr  error
	once    bool // do not block for buffer space
}

func newStream(conn *net.UnixConn) (*stream, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &stream{conn: conn, raw: raw, buf: make([]byte, firstBufferCapacity),
		writing: make(chan struct{}, 1), closing: closeAll}
	s.recv, s.send = s.recvmsg, s.sendmsg
	s.beforeRead, s.nothingRead = func() {}, func() {}
	return s, nil
}

// frame returns the next frame's bytes, which are valid until the next call, and the offset of its
// first byte. Frames that have begun must end within the timeout; 0 leaves the connection's own
// deadline in effect.
func (s *stream) frame(timeout time.Duration) ([]byte, int64, error) {
	limited := false
	for {
		if payload, at, err := s.buffered(); payload != nil || err != nil {
			if limited {
				err = errors.Join(err, s.conn.SetReadDeadline(time.Time{}))
			}
			return payload, at, err
		}
		if s.end > s.start && timeout > 0 && !limited {
			limited = true
			if err := s.conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
				return nil, 0, err
			}
		}
		if err := s.fill(); err != nil {
			return nil, 0, err
		}
	}
}

// blockFor sets the timeout of reads that block in the kernel, if soon is set. All other calls do
// not block.
func (s *stream) blockFor(limit time.Duration) (err error) {
	timeout := unix.NsecToTimeval(limit.Nanoseconds())
	controlErr := s.raw.Control(func(fd uintptr) {
		if err = unix.SetsockoptTimeval(int(fd), unix.SOL_SOCKET, unix.SO_RCVTIMEO,
			&timeout); err == nil {
			err = unix.SetNonblock(int(fd), false)
		}
	})
	return errors.Join(controlErr, err)
}

func (s *stream) buffered() ([]byte, int64, error) {
	have := s.end - s.start
	if have < 4 {
		return nil, 0, nil
	}
	length := binary.LittleEndian.Uint32(s.buf[s.start:])
	if length == 0 || length > MaxFrame {
		return nil, 0, violation("a frame of %d bytes; 1 to %d are allowed", length, MaxFrame)
	}
	if have < 4+int(length) {
		return nil, 0, nil
	}
	payload, at := s.buf[s.start+4:s.start+4+int(length)], s.offset
	s.start += 4 + int(length)
	s.offset += 4 + int64(length)
	return payload, at, nil
}

// bufferEmpty reports whether nothing has arrived beyond the frames that were consumed.
func (s *stream) bufferEmpty() bool { return s.start == s.end }

// fill reads once. The buffer grows with the arriving bytes, never with an announced length.
func (s *stream) fill() error {
	if err := s.growBuffer(); err != nil {
		return err
	}
	if err := s.raw.Read(s.recv); err != nil &&
		!(s.late && errors.Is(err, os.ErrDeadlineExceeded) && s.recvNow()) {
		return err
	}
	if s.readErr != nil {
		return os.NewSyscallError("recvmsg", s.readErr)
	}
	first := s.offset + int64(s.end-s.start)
	s.end += s.readBytes
	if err := s.keepDescriptors(first); err != nil {
		return err
	}
	if s.readBytes == 0 {
		if s.end > s.start {
			return io.ErrUnexpectedEOF
		}
		return io.EOF
	}
	return nil
}

func (s *stream) growBuffer() error {
	switch {
	case s.start == s.end:
		s.start, s.end = 0, 0
		if len(s.buf) > keepBufferCapacity {
			s.buf = make([]byte, firstBufferCapacity)
			return s.chargeBuffer(0)
		}
	case s.start > 0 && s.end == len(s.buf):
		s.end = copy(s.buf, s.buf[s.start:s.end])
		s.start = 0
	}
	if s.end < len(s.buf) {
		return nil
	}
	if err := s.chargeBuffer(2 * len(s.buf)); err != nil {
		return err
	}
	s.buf = append(s.buf, make([]byte, len(s.buf))...) // at most twice a frame
	return nil
}

// chargeBuffer charges for a buffer of this size instead of the earlier one. Small ones are free.
func (s *stream) chargeBuffer(bytes int) error {
	if bytes <= keepBufferCapacity {
		bytes = 0
	}
	if s.charge == nil || bytes == s.charged {
		return nil
	}
	if err := s.charge(bytes - s.charged); err != nil {
		return err
	}
	s.charged = bytes
	return nil
}

func (s *stream) recvmsg(fd uintptr) bool {
	flags := unix.MSG_CMSG_CLOEXEC | unix.MSG_DONTWAIT
	if s.deadlineSet && s.start == s.end { // no frame has begun, so the deadline ends
		flags &^= unix.MSG_DONTWAIT
	}
	s.beforeRead()
	for {
		s.readBytes, s.readOOB, s.readFlags, _,
			s.readErr = unix.Recvmsg(int(fd), s.buf[s.end:], s.oob[:], flags)
		if s.readErr == unix.EINTR {
			continue
		}
		done := s.readErr != unix.EAGAIN || s.deadlineSet
		if !done {
			s.nothingRead()
		}
		return done
	}
}

// recvNow reads without waiting, and reports whether there was something to read.
func (s *stream) recvNow() (done bool) {
	err := s.raw.Control(func(fd uintptr) { done = s.recvmsg(fd) })
	return err == nil && done
}

// keepDescriptors takes ownership of the last read's descriptors; closeDescriptors closes the
// unused ones.
func (s *stream) keepDescriptors(first int64) error {
	if s.readOOB == 0 {
		return nil
	}
	fds, err := parseRights(s.oob[:s.readOOB])
	if len(fds) > 0 {
		s.batches = append(s.batches,
			batch{first: first, last: first + int64(s.readBytes), fds: fds})
	}
	switch {
	case err != nil:
		return violation("control message: %v", err)
	case s.readFlags&unix.MSG_CTRUNC != 0 && len(fds) < MaxDescriptors:
		return fmt.Errorf("receive descriptors: %w", unix.EMFILE)
	case s.readFlags&unix.MSG_CTRUNC != 0:
		return violation("more than %d descriptors with one frame", MaxDescriptors)
	case len(s.batches) > 2:
		return violation("descriptors in the middle of a frame")
	}
	return nil
}

func parseRights(oob []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	var fds []int
	for i := range messages {
		if messages[i].Header.Level != unix.SOL_SOCKET ||
			messages[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		some, parseErr := unix.ParseUnixRights(&messages[i])
		fds, err = append(fds, some...), errors.Join(err, parseErr)
	}
	return fds, err
}

// takeDescriptors returns the n descriptors of the frame that began at that offset, which the
// caller closes.
func (s *stream) takeDescriptors(at int64, n int) ([]int, error) {
	if len(s.batches) > 0 && s.batches[0].last <= at {
		return nil, violation("%d descriptors that no frame names", len(s.batches[0].fds))
	}
	if n == 0 {
		if len(s.batches) > 0 && s.start == s.end {
			return nil, violation("%d descriptors came with a frame that names none",
				len(s.batches[0].fds))
		}
		return nil, nil
	}
	if len(s.batches) == 0 || at < s.batches[0].first {
		return nil, violation("a frame names %d descriptors and none came with its first byte", n)
	}
	fds := s.batches[0].fds
	if len(fds) != n {
		return nil, violation("a frame names %d descriptors and %d came with it", n, len(fds))
	}
	s.batches = append(s.batches[:0], s.batches[1:]...)
	return fds, nil
}

func (s *stream) closeDescriptors() {
	for _, b := range s.batches {
		s.closing(b.fds)
	}
	s.batches = nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		// Close releases the descriptor even if it fails.
		_ = unix.Close(fd)
	}
}

// errPartial says that a timeout truncated a frame, so that no further frame can be sent.
var errPartial = errors.New("a frame was only partly sent")

func (s *stream) lock(ctx context.Context) error {
	select {
	case s.writing <- struct{}{}:
		return nil
	default:
	}
	select {
	case s.writing <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *stream) unlock() { <-s.writing }

// write sends one frame, length included, and the descriptors with its first byte. The caller holds
// the lock. If there is buffer space, it takes one system call; otherwise it waits for space until
// the timeout or the end of the context.
func (s *stream) write(ctx context.Context, frame []byte, fds []int, timeout time.Duration) error {
	s.out, s.outOOB, s.once = frame, nil, true
	if len(fds) > 0 {
		s.outOOB = unix.UnixRights(fds...)
	}
	if err := s.flush(); err != nil || len(s.out) == 0 {
		return err
	}
	return s.writeSlowly(ctx, len(frame), timeout)
}

func (s *stream) writeSlowly(ctx context.Context, whole int, timeout time.Duration) error {
	if err := s.conn.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		// Fails only when the connection is closed, which ends the wait as well.
		_ = s.conn.SetWriteDeadline(time.Unix(1, 0))
	})
	s.once = false
	err := s.flush()
	if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() == nil {
		s.once = true // once without waiting, because this process may not have run
		err = cmp.Or(s.raw.Control(func(fd uintptr) { s.sendmsg(fd) }), s.leftover(err))
	}
	if !stop() {
		<-interrupted // otherwise its deadline would interrupt the next write
		err = errors.Join(ctx.Err(), err)
	}
	if err != nil && len(s.out) < whole {
		return errors.Join(errPartial, err)
	}
	return errors.Join(err, s.conn.SetWriteDeadline(time.Time{}))
}

// leftover returns err if a part of the frame is not sent.
func (s *stream) leftover(err error) error {
	if len(s.out) == 0 {
		return nil
	}
	return err
}

func (s *stream) flush() error {
	if err := s.raw.Write(s.send); err != nil {
		return err
	}
	if s.outErr != nil && s.outErr != unix.EAGAIN {
		return os.NewSyscallError("sendmsg", s.outErr)
	}
	return nil
}

func (s *stream) sendmsg(fd uintptr) bool {
	for len(s.out) > 0 {
		var n int
		n, s.outErr = unix.SendmsgN(int(fd), s.out, s.outOOB, nil,
			unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		switch {
		case s.outErr == unix.EINTR:
		case s.outErr == unix.EAGAIN:
			return s.once
		case s.outErr != nil:
			return true
		default:
			s.out, s.outOOB = s.out[n:], nil // the descriptors were sent with the first byte
		}
	}
	s.outErr = nil
	return true
}

// unread reports whether the peer has not read all sent data.
func (s *stream) unread() bool {
	var queued int
	var err error
	controlErr := s.raw.Control(func(fd uintptr) {
		queued, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
	})
	return controlErr == nil && err == nil && queued > 0
}
