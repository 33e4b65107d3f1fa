package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

const (
	subjectSocket   = "socket"
	subjectProtocol = "protocol"
	subjectRights   = "rights"
	subjectDaemon   = "daemon"
)

// slowAnswer is how long a trivial answer may take without a warning. Python clients fall back
// after 50 ms.
const slowAnswer = 50 * time.Millisecond

// lookForDaemon finds the socket and connects. The client is nil if no daemon answers this user.
func lookForDaemon(ctx context.Context, a *cli.Call) (*unixsock.Client, []Finding) {
	f := &findings{side: "client"}
	paths := a.Sockets()
	var there []string
	var found []fs.FileInfo
	for _, path := range paths {
		switch info, err := os.Stat(path); {
		case err == nil && info.Mode()&fs.ModeSocket == 0:
			f.problem(subjectSocket, fmt.Sprintf("%s is not a socket but %s, so no daemon can "+
				"listen there", path, modelfile.KindName(info.Mode())),
				"another program made it: remove it, and start epcached again")
		case err == nil && !slices.ContainsFunc(found, func(other fs.FileInfo) bool {
			return os.SameFile(other, info)
		}):
			// A link of the user's daemon to its socket counts once.
			there, found = append(there, path), append(found, info)
		}
	}
	if len(there) > 1 {
		f.warning(subjectSocket, fmt.Sprintf("two daemons run: %s is used, and %s is not; each "+
			"compiles and stores its own builds", there[0], strings.Join(there[1:], ", ")),
			"choose one for all programs: "+unixsock.SocketVariable+"="+there[len(there)-1])
	}
	start := time.Now()
	client, err := a.Connect(ctx)
	if err != nil {
		f.notConnected(ctx, a, there, err)
		return nil, f.List
	}
	took := time.Since(start)
	f.ok(subjectSocket, "%s answers", term.TextOrDash(strings.Join(there, ", ")))
	start = time.Now()
	status, err := unixsock.Ask[wire.StatusReply](ctx, client, &wire.Status{}, nil)
	statusTook := time.Since(start)
	if err == nil {
		f.socketOrigin(a, status)
	}
	if took > slowAnswer {
		f.warning(subjectDaemon, fmt.Sprintf("it took %s to answer; applications wait 50 ms and "+
			"then compile by themselves", term.Seconds(took.Seconds())),
			"check the load of the machine; the first answer of a daemon that its socket starts "+
				"is slow")
	}
	if err != nil {
		f.problem(subjectDaemon, fmt.Sprintf("it does not report its status: %v", err), "see "+
			""+daemon.LogOf(a.Sockets()))
		return client, f.List
	}
	if statusTook > slowAnswer {
		f.warning(subjectDaemon, "its status took "+term.Seconds(statusTook.Seconds())+": the "+
			"machine, the daemon or its disk is busy", "check its load: epcachectl status --watch")
	}
	f.versions(a, client.Hello(), status)
	return client, f.List
}

func (f *findings) notConnected(ctx context.Context, a *cli.Call, there []string, err error) {
	none, unanswered := errors.AsType[*exit.NoDaemonError](err)
	named := ""
	if a.Socket == "" && os.Getenv(unixsock.SocketVariable) != "" {
		named = "; " + unixsock.SocketVariable + " names it"
	}
	absent := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
	const alone = "; applications compile by themselves, each time"
	program := a.DaemonProgram()
	starts := program != "" && len(unixsock.UserSockets()) > 0
	if starts && (absent || errors.Is(err, syscall.ENOTDIR)) {
		if text, hint := whyCannotStart(ctx, program); text != "" {
			f.problem(subjectDaemon, "none runs, and none can be started: "+text+alone, hint)
			return
		}
	}
	switch {
	case unanswered && absent && starts:
		f.ok(subjectDaemon, "none runs; the next client starts one: %s --autostart", program)
	case unanswered && absent && program != "":
		f.problem(subjectSocket,
			none.Text+"; none can be started: there is no home directory"+alone,
			"set HOME, or XDG_RUNTIME_DIR, or "+none.Hint)
	case unanswered && absent && daemon.AutostartOff():
		f.problem(subjectSocket,
			none.Text+named+", and "+daemon.AutostartVariable+" says that none is started"+alone,
			none.Hint)
	case unanswered:
		f.problem(subjectSocket, none.Text+named+alone, none.Hint)
	case errors.Is(err, fs.ErrPermission):
		path := deniedSocket(a.Sockets())
		hint := "a system daemon's socket needs SocketMode=0666 in epcached.socket, and mode " +
			"0755 of all directories above it"
		if slices.Contains(unixsock.UserSockets(), path) && named == "" && a.Socket == "" {
			hint = "HOME, XDG_STATE_HOME or XDG_RUNTIME_DIR is another user's, as under sudo: " +
				"set it to a directory of this user, or name a socket with --socket or " +
				unixsock.SocketVariable
		}
		may := "a directory above it may not be entered"
		if info, err := os.Stat(path); err == nil {
			may = "its mode is " + info.Mode().Perm().String()
		}
		f.problem(subjectRights,
			fmt.Sprintf("this user may not connect to %s: %v%s", path, may, named), hint)
	case errors.Is(err, unixsock.ErrVersion):
		f.problem(subjectProtocol, err.Error()+"; it cannot be used", "install epcached and "+
			"epcachectl of one release, and start the daemon again")
	default:
		f.problem(subjectSocket, err.Error()+named, "see "+daemon.LogOf(there))
	}
}

// deniedSocket returns the first of the paths that this process may not access.
func deniedSocket(paths []string) string {
	for _, path := range paths {
		if errors.Is(unix.Access(path, unix.W_OK), fs.ErrPermission) {
			return path
		}
	}
	return term.TextOrDash(strings.Join(paths, ", "))
}

// versions compares this program with the daemon, and the daemon with the program that it was
// started from.
func (f *findings) versions(a *cli.Call, hello *wire.HelloReply, status *wire.StatusReply) {
	if status.GetVersion() != a.Version {
		f.warning(subjectDaemon, fmt.Sprintf("it is epcached %s, and this is epcachectl %s: one "+
			"of them is outdated", status.GetVersion(), a.Version),
			"start the daemon again after an upgrade: "+restartHint)
	} else {
		f.ok(subjectDaemon, "epcached %s, pid %d, uid %d; you are uid %d, scope %s",
			status.GetVersion(), status.GetPid(), hello.GetDaemonUid(), hello.GetUid(),
			hello.GetScope())
	}
	// Readable only for own processes, or by root.
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", status.GetPid())); err == nil &&
		strings.HasSuffix(exe, " (deleted)") {
		f.warning(subjectDaemon, "its program was replaced after it started, and it still runs "+
			"the old one", "restart it: "+restartHint)
	}
}

// restartHint says how to restart a daemon, however it was started.
const restartHint = "epcachectl stop ends it, and prints how to start it again"

// socketOrigin says why this daemon is used, and whether a client started it.
func (f *findings) socketOrigin(a *cli.Call, status *wire.StatusReply) {
	how := "found at a default socket"
	if a.Socket != "" {
		how = "named by --socket"
	} else if os.Getenv(unixsock.SocketVariable) != "" {
		how = "named by " + unixsock.SocketVariable
	}
	switch status.GetStartedBy() {
	case "client":
		how += "; a client started it, and it exits when idle; its log is epcached.log in " +
			"" + status.GetStateDirectory()
	case "socket":
		how += "; systemd started it when a program connected to its socket " + status.GetSocket()
	case "service":
		how += "; it is a service, and listens on " + status.GetSocket()
	}
	f.ok(subjectDaemon, "%s", how)
	if status.GetStartedBy() == "client" {
		return // it reports errors in the user's configuration itself
	}
	if _, err := ownConfiguration(); err != nil {
		f.problem("configuration", "the user's own daemon would not start: "+err.Error(),
			fixConfigurationHint)
	}
}

// minFreeSpace is how many bytes a daemon leaves free on its disk. With less it does not compile,
// and with much less it does not start.
const minFreeSpace = 16 << 20

// whyCannotStart returns why the program could not start the user's own daemon, with the remedy; ""
// if no reason is found. It changes no files.
func whyCannotStart(ctx context.Context, program string) (text, hint string) {
	// Only if the variable chose it; a program beside this one is trusted.
	if os.Getenv(daemon.ProgramVariable) != "" {
		if text := whyNotDaemon(ctx, program); text != "" {
			return text + daemon.ProgramOrigin(),
				"name the program epcached with " + daemon.ProgramVariable + ", or nothing"
		}
	}
	if err := daemon.Obstacle(); err != nil {
		text, hint, _ = strings.Cut(err.Error(), ": ")
		return text, hint
	}
	s, err := ownConfiguration()
	if err != nil {
		return err.Error(), fixConfigurationHint
	}
	state, above := s.State, s.State
	info, err := os.Stat(above)
	for err != nil && above != filepath.Dir(above) {
		above = filepath.Dir(above)
		info, err = os.Stat(above)
	}
	if err == nil && !info.IsDir() {
		return fmt.Sprintf("%s is not a directory", above), "another program made it: move it away"
	}
	if err == nil && above == state && info.Mode().Perm()&0o022 != 0 {
		return fmt.Sprintf("other users may write to its state directory %s (mode %04o)", state,
			info.Mode().Perm()), "chmod go-w " + state + ", if no other user has written there"
	}
	lock := filepath.Join(state, "lock")
	if l, err := os.Lstat(lock); err == nil && !l.Mode().IsRegular() {
		return lock + " is not a regular file", "remove it: rm " + lock
	}
	if err := unix.Access(above, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Sprintf("its state directory %s cannot be written: %v", state, err), "check " +
			"its owner and that its disk is mounted writable; or name another directory: state " +
			"in epcached.toml"
	}
	if free, err := cas.FreeBytes(above); err == nil && free < minFreeSpace {
		return fmt.Sprintf("only %s are free for %s, and a daemon needs %s", term.Bytes(free),
				state, term.Bytes(minFreeSpace)),
			"free some space on the disk, or name another directory: state in epcached.toml"
	}
	return "", ""
}

const fixConfigurationHint = "correct it: epcachectl config check lists all mistakes"

// ownConfiguration reads the configuration of the user's own daemon. Its error is one line.
func ownConfiguration() (*config.Settings, error) {
	s, err := config.LoadUserFile("")
	if err == nil {
		_, err = s.LoadRules()
	}
	if mistakes, is := errors.AsType[config.Errors](err); is && len(mistakes) > 1 {
		err = fmt.Errorf("%w, and %d more", mistakes[0], len(mistakes)-1)
	}
	return s, err
}

func whyNotDaemon(ctx context.Context, program string) string {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	switch {
	case err != nil:
		return fmt.Sprintf("%s --version: %v", program, err)
	case !strings.HasPrefix(string(out), "epcached "):
		return program + " is not epcached"
	}
	return ""
}
