package daemon

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// startLock is held by the one process that starts the daemon for all that want one at the same time, whichever client they are of:
// doc/protocol.md, "Starting a daemon". The file says why the last start failed; nothing, if it did not.
type startLock struct {
	file  *os.File
	asked time.Time // when this process began to want it
}

const (
	startLockSuffix = ".start"
	startPause      = 3 * time.Millisecond
	maxStartReason  = 1024
)

// lockStart waits for the lock of a socket. It returns nil without an error as soon as `meanwhile` tells that there is a daemon.
func lockStart(ctx context.Context, socket string, meanwhile func() bool) (*startLock, error) {
	asked := time.Now()
	file, err := os.OpenFile(socket+startLockSuffix, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	l := &startLock{file, asked}
	for end := l.asked.Add(MaxWait); ; {
		switch err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil && !meanwhile():
			return l, nil
		case err == nil, errors.Is(err, unix.EWOULDBLOCK) && meanwhile():
			return nil, file.Close()
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR): // as on a file system without locks
			return nil, errors.Join(err, file.Close())
		case time.Now().After(end):
			return nil, errors.Join(errors.New("one is being started, and does not answer yet"), file.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), file.Close())
		case <-time.After(startPause):
		}
	}
}

// failed tells why the start failed that went on while this process waited: a hundred of them are not to try it one after the other. What failed
// before is tried again, for this is a person's command, who may just have mended it.
func (l *startLock) failed() string {
	info, err := l.file.Stat()
	if err != nil || info.Size() == 0 || info.ModTime().Before(l.asked) {
		return ""
	}
	reason, err := io.ReadAll(io.NewSectionReader(l.file, 0, maxStartReason))
	if err != nil {
		return ""
	}
	return string(reason)
}

// end gives the lock back, and leaves to the others why there is no daemon; "" where there is one.
func (l *startLock) end(reason string) {
	// On a full disk nothing is left, and the next one tries.
	if l.file.Truncate(0) == nil && reason != "" {
		_, _ = l.file.WriteAt([]byte(reason[:min(len(reason), maxStartReason)]), 0)
	}
	_ = l.file.Close() // nothing of what it holds is kept beyond a minute
}
