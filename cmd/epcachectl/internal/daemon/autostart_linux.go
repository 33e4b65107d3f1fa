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

// AutostartVariable is the environment variable that disables autostart.
const AutostartVariable = "EPCACHE_AUTOSTART"

// ProgramVariable names the program to start.
const ProgramVariable = "EPCACHE_DAEMON"

// ConnectOrStart connects. If there is no daemon it first starts the user's own, as applications
// do.
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
		// the system's daemon is restarting, so do not start the user's own
		return f.Connect(ctx)
	}
	there := func() bool {
		c, err := at.Connect(ctx)
		return err == nil && c.Close() == nil
	}
	failed := startDaemon(ctx, program, there)
	c, err = f.Connect(ctx) // succeeds also if another process has started it
	none, is := errors.AsType[*exit.NoDaemonError](err)
	switch {
	case is && failed != nil:
		err = none.WithHint(fmt.Sprintf("none can be started: %v", failed))
	case is && os.Getenv(ProgramVariable) != "":
		err = none.WithHint(fmt.Sprintf("%s --autostart reported success, but no daemon "+
			"answers%s", program, ProgramOrigin()))
	}
	return c, err
}

// startMu guards the connection that the models of a call share; the first one makes it.
var startMu sync.Mutex

// OwnDaemon returns the connection to the user's own daemon, for requests that another user's does
// not serve. It starts the daemon if necessary. CloseOwn closes the connection.
func (f *Finder) OwnDaemon(ctx context.Context) (*unixsock.Client, error) {
	startMu.Lock()
	defer startMu.Unlock()
	if f.ownClient != nil {
		return f.ownClient, nil
	}
	program := f.DaemonProgram()
	if program == "" {
		return nil, errors.New("no daemon can be started for this user")
	}
	dial := func() (*unixsock.Client, error) {
		return f.dialer().Dial(ctx, unixsock.UserSockets()...)
	}
	err := startDaemon(ctx, program, func() bool {
		c, err := dial()
		return err == nil && c.Close() == nil
	})
	if err == nil {
		f.ownClient, err = dial()
	}
	return f.ownClient, err
}

// DaemonProgram finds the program that starts a daemon: EPCACHE_DAEMON, beside this program, or in
// PATH; "" if autostart is off.
func (f *Finder) DaemonProgram() string {
	if AutostartOff() || f.Socket != "" || os.Getenv(unixsock.SocketVariable) != "" {
		return ""
	}
	if named := os.Getenv(ProgramVariable); named != "" {
		return named
	}
	self, err := os.Executable()
	if err != nil { // without /proc
		self, err = exec.LookPath(os.Args[0])
	}
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

// AutostartOff reports whether clients are configured to start no daemon.
func AutostartOff() bool {
	return slices.Contains([]string{"0", "no", "off", "false"},
		strings.ToLower(os.Getenv(AutostartVariable)))
}

// Obstacle returns why no process of this user can start a daemon, nil if no reason is found.
func Obstacle() error {
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		return fmt.Errorf("/proc is not mounted: mount it, or set %s=0", AutostartVariable)
	}
	for _, socket := range unixsock.UserSockets() {
		if len(socket) < len(syscall.RawSockaddrUnix{}.Path) {
			return nil
		}
	}
	return errors.New("the path in HOME is too long for a socket, or there is none: set " +
		"XDG_RUNTIME_DIR to a short one")
}

// startDaemon starts the daemon, and returns when it answers, or why it does not. there reports
// whether a daemon answers.
func startDaemon(ctx context.Context, program string, there func() bool) error {
	failed := Obstacle()
	if failed != nil {
		return failed
	}
	for _, socket := range unixsock.UserSockets() {
		if failed = unixsock.MakePrivateDir(filepath.Dir(socket)); failed == nil {
			return startAt(ctx, program, socket, there)
		}
	}
	return failed
}

// startAt is startDaemon for one socket. Of all processes that want a daemon at the same time, one
// holds a lock and starts it: see doc/protocol.md, "Starting a daemon". The lock's file has the
// reason if the last start failed.
func startAt(ctx context.Context, program, socket string, there func() bool) error {
	asked := time.Now()
	lock, err := os.OpenFile(socket+".start", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close() // its content is valid for a minute only
	for {
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		held := errors.Is(err, unix.EWOULDBLOCK)
		switch {
		case (err == nil || held) && there():
			return nil
		case err == nil:
			return startLocked(ctx, program, socket, lock, asked)
		case !held && !errors.Is(err, unix.EINTR): // for example a file system without locks
			return err
		case time.Since(asked) > MaxWait:
			return errors.New("one is being started, and does not answer yet")
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(3 * time.Millisecond):
		}
	}
}

const maxStartReason = 1024

// ofThisProgram is in the reasons for which only the calling program cannot start a daemon.
const ofThisProgram = "the program that starts it has"

// startLocked returns the error of a start that another process attempted since this one asked, so
// that a hundred processes do not try one after the other. Earlier failures are retried, because
// the user may have fixed the cause.
func startLocked(ctx context.Context, program, socket string, lock *os.File,
	requested time.Time) error {
	reason := ""
	if info, err := lock.Stat(); err == nil && !info.ModTime().Before(requested) {
		text := make([]byte, maxStartReason)
		n, _ := lock.ReadAt(text, 0) // an unreadable reason is ignored
		reason = string(text[:n])
	}
	if reason == "" {
		reason = start(ctx, program, socket)
	}
	// Best effort: on a full disk the next process tries too, and so it does if only this process
	// may not start one.
	if lock.Truncate(0) == nil && reason != "" && !strings.Contains(reason, ofThisProgram) {
		_, _ = lock.WriteAt([]byte(reason[:min(len(reason), maxStartReason)]), 0)
	}
	if reason != "" {
		return errors.New(reason)
	}
	return nil
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
	line, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(said.String()), "epcached: "),
		"\n")
	return cmp.Or(line, fmt.Sprintf("%s --autostart: %v", program, err)) + ProgramOrigin()
}

// ProgramOrigin names the variable that chose the program, which may not be a daemon.
func ProgramOrigin() string {
	if os.Getenv(ProgramVariable) == "" {
		return ""
	}
	return "; " + ProgramVariable + " names the program"
}
