package daemon

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
)

// AutostartVariable switches off that clients start a daemon.
const AutostartVariable = "EPCACHE_AUTOSTART"

// ProgramVariable names the program to start.
const ProgramVariable = "EPCACHE_DAEMON"

// ConnectOrStart connects, and where there is no daemon has the user's own started first, as applications do.
func (f *Finder) ConnectOrStart(ctx context.Context) (*unixsock.Client, error) {
	program := f.DaemonProgram()
	if program == "" {
		return f.Connect(ctx)
	}
	at := *f
	at.Wait, at.WaitSet = 0, true
	c, err := at.Connect(ctx)
	if err == nil || !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
		return c, err
	}
	if _, there := os.Lstat(unixsock.SystemSocket); there == nil {
		return f.Connect(ctx) // the system's daemon is about to come back, and its users are not to be scattered
	}
	there := func() bool {
		c, err := at.Connect(ctx)
		return err == nil && c.Close() == nil
	}
	failed := startDaemon(ctx, program, there)
	c, err = f.Connect(ctx) // which succeeds as well where another process was faster
	none, is := errors.AsType[*exit.NoDaemonError](err)
	switch {
	case is && failed != nil:
		err = none.WithHint(fmt.Sprintf("none can be started: %v", failed))
	case is && os.Getenv(ProgramVariable) != "":
		err = none.WithHint(fmt.Sprintf("%s --autostart ended as if it had started one%s", program, NamedBy()))
	}
	return c, err
}

// starting guards the connection that the models of a call share, made by the first one that needs it.
var starting sync.Mutex

// OwnDaemon returns the connection to the user's own daemon, for what another user's does not do.
// The daemon is started if need be. CloseOwn closes the connection.
func (f *Finder) OwnDaemon(ctx context.Context) (*unixsock.Client, error) {
	starting.Lock()
	defer starting.Unlock()
	if f.own != nil {
		return f.own, nil
	}
	program := f.DaemonProgram()
	if program == "" {
		return nil, errors.New("no daemon of this user's can be started")
	}
	dial := func() (*unixsock.Client, error) { return f.dialer().Dial(ctx, unixsock.UserSockets()...) }
	err := startDaemon(ctx, program, func() bool {
		c, err := dial()
		return err == nil && c.Close() == nil
	})
	if err == nil {
		f.own, err = dial()
	}
	return f.own, err
}

// DaemonProgram finds what starts a daemon, named by EPCACHE_DAEMON, beside this program or in PATH; "" where none is to be started.
func (f *Finder) DaemonProgram() string {
	if AutostartOff() || f.Socket != "" || os.Getenv(unixsock.SocketVariable) != "" {
		return ""
	}
	if named := os.Getenv(ProgramVariable); named != "" {
		return named
	}
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	if beside := filepath.Join(filepath.Dir(self), "epcached"); err == nil {
		if info, err := os.Stat(beside); err == nil && info.Mode().IsRegular() {
			return beside
		}
	}
	if path, err := exec.LookPath("epcached"); err == nil {
		return path
	}
	return ""
}

// AutostartOff reports whether clients are told to start no daemon.
func AutostartOff() bool {
	return slices.Contains([]string{"0", "no", "off", "false"}, strings.ToLower(os.Getenv(AutostartVariable)))
}

// startDaemon returns when the daemon answers, or with the reason why there is none. `there` tells whether there is one by now.
func startDaemon(ctx context.Context, program string, there func() bool) error {
	failed := errors.New("there is no home directory")
	for _, socket := range unixsock.UserSockets() {
		if failed = unixsock.OwnFolder(filepath.Dir(socket)); failed != nil {
			continue
		}
		lock, err := lockStart(ctx, socket, there)
		if lock == nil || err != nil {
			return err
		}
		reason := lock.failed()
		if reason == "" {
			reason = start(ctx, program, socket)
		}
		if lock.end(reason); reason != "" {
			err = errors.New(reason)
		}
		return err
	}
	return failed
}

// start runs the program that starts the daemon, and returns why it did not; "" if it did.
func start(ctx context.Context, program, socket string) string {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, program, "--autostart", "--socket", socket)
	cmd.Stderr = &said
	err := cmd.Run()
	if err == nil {
		return ""
	}
	line, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(said.String()), "epcached: "), "\n")
	return cmp.Or(line, fmt.Sprintf("%s --autostart: %v", program, err)) + NamedBy()
}

// NamedBy says what has the program be this one, where that is a variable: it may be no daemon at all.
func NamedBy() string {
	if os.Getenv(ProgramVariable) == "" {
		return ""
	}
	return "; " + ProgramVariable + " names the program"
}

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
	if err != nil || info.ModTime().Before(l.asked) {
		return ""
	}
	reason := make([]byte, maxStartReason)
	n, _ := l.file.ReadAt(reason, 0) // what cannot be read is tried again
	return string(reason[:n])
}

// end gives the lock back, and leaves to the others why there is no daemon; "" where there is one.
func (l *startLock) end(reason string) {
	// On a full disk nothing is left, and the next one tries.
	if l.file.Truncate(0) == nil && reason != "" {
		_, _ = l.file.WriteAt([]byte(reason[:min(len(reason), maxStartReason)]), 0)
	}
	_ = l.file.Close() // nothing of what it holds is kept beyond a minute
}
