package daemon

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
)

// noDaemon distinguishes a daemon that does not run from one that does not answer. It returns other
// errors unchanged.
func noDaemon(paths []string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return exit.Hint(err, "for the reason: epcachectl doctor")
	}
	if !errors.Is(err, unixsock.ErrNoDaemon) {
		return err
	}
	why := "there is no such socket"
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		why = "its socket was left behind by a daemon that ended"
		if info, wrong := os.Lstat(paths[0]); wrong == nil &&
			info.Mode().Type() != fs.ModeSocket {
			text := "another file has the path of the socket " + paths[0]
			return &exit.NoDaemonError{Text: text, Hint: "name the socket of the daemon with " +
				"--socket or " + unixsock.SocketVariable, Cause: err}
		}
	case !errors.Is(err, fs.ErrNotExist):
		return silentDaemon(paths, err)
	}
	text := "no daemon answers at " + strings.Join(paths, " or ") + ": " + why
	return &exit.NoDaemonError{Text: text, Hint: startHint, Cause: err}
}

const startHint = "start one with: epcached --runtime DIR, or name its socket with --socket or " +
	unixsock.SocketVariable

// howToStart replaces the hint startHint by one that suits how the socket was found.
func (f *Finder) howToStart(err error) error {
	none, is := errors.AsType[*exit.NoDaemonError](err)
	if !is || none.Hint != startHint {
		return err
	}
	switch named := cmp.Or(f.Socket, os.Getenv(unixsock.SocketVariable)); {
	case named != "":
		none.Hint = "start one with: epcached --runtime DIR --socket " + named
	case f.DaemonProgram() != "" && len(unixsock.UserSockets()) > 0:
		none.Hint = "the next client starts a daemon; epcachectl doctor says whether it can"
	}
	return none
}

// silentDaemon returns the error for a daemon that listens but does not answer.
func silentDaemon(paths []string, err error) error {
	h, known := holderOf(paths)
	where, log := strings.Join(paths, " or "), LogOf(paths)
	if known {
		where, log = h.path, LogOf([]string{h.path})
	}
	if h.pid > 0 {
		where += fmt.Sprintf(", process %d,", h.pid)
	}
	why, hint := ": it or the machine is overloaded", "check its process, and "+log
	switch {
	case !known:
		why = ": it is suspended, or the machine is overloaded"
	case h.stopped:
		why, hint = ": it was stopped by a signal", fmt.Sprintf("resume it: kill -CONT %d", h.pid)
	}
	text := fmt.Sprintf("the daemon at %s does not answer within %v", where, helloTimeout)
	return &exit.NoDaemonError{Text: text + why, Hint: hint, Cause: err}
}

// LogOf says where to find the log of the daemon that serves the first existing socket among the
// paths.
func LogOf(paths []string) string {
	for _, path := range paths {
		_, err := os.Lstat(path)
		switch {
		case err != nil:
		case path == unixsock.SystemSocket:
			return "its log: journalctl -u epcached"
		case slices.Contains(unixsock.UserSockets(), path):
			// The log of a daemon that a client started.
			own := filepath.Join(unixsock.UserState(), "epcached.log")
			if _, err := os.Stat(own); err == nil {
				return "its log: " + own
			}
			return "its log: journalctl --user -u epcached, or where it was started"
		default:
			return "its log, on the terminal where it was started"
		}
	}
	return "its log: journalctl -u epcached"
}

// holder is the process that listens at a socket, as the kernel reports it, also for a suspended
// process.
type holder struct {
	path    string
	pid     int
	stopped bool // by a signal, or by a debugger
}

func holderOf(paths []string) (h holder, ok bool) {
	for _, path := range paths {
		// with a timeout, because a full queue blocks
		conn, err := net.DialTimeout("unix", path, 50*time.Millisecond)
		if err != nil {
			continue
		}
		h = holder{path: path}
		if raw, err := conn.(*net.UnixConn).SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { // on an error the holder is unknown
				if peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET,
					unix.SO_PEERCRED); err == nil {
					h.pid = int(peer.Pid) // 0 for one of another pid namespace
				}
			})
		}
		_ = conn.Close() // no data was sent
		h.stopped = stopped(h.pid)
		return h, true
	}
	return holder{}, false
}

func stopped(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// the name before it may have any characters
	rest := bytes.TrimLeft(text[bytes.LastIndexByte(text, ')')+1:], " ")
	return len(rest) > 0 && (rest[0] == 'T' || rest[0] == 't')
}
