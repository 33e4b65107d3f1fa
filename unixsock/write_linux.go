package unixsock

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// errPartial says that a frame was cut off by a timeout: nothing that follows could be understood.
var errPartial = errors.New("a frame was sent in part")

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

// write sends one frame, length included, and the descriptors with its first byte. The caller holds the lock. One
// system call is all it takes while the peer reads; else it waits for room until the timeout or the context ends.
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
	if !stop() {
		<-interrupted // or its deadline would meet the next write
		err = errors.Join(ctx.Err(), err)
	}
	if err != nil && len(s.out) < whole {
		return errors.Join(errPartial, err)
	}
	return errors.Join(err, s.conn.SetWriteDeadline(time.Time{}))
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
		n, s.outErr = unix.SendmsgN(int(fd), s.out, s.outOOB, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		switch {
		case s.outErr == unix.EINTR:
		case s.outErr == unix.EAGAIN:
			return s.once
		case s.outErr != nil:
			return true
		default:
			s.out, s.outOOB = s.out[n:], nil // descriptors went with the first byte
		}
	}
	s.outErr = nil
	return true
}

// unread tells whether the peer has yet to read something that was sent.
func (s *stream) unread() bool {
	var queued int
	var err error
	controlErr := s.raw.Control(func(fd uintptr) { queued, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	return controlErr == nil && err == nil && queued > 0
}
