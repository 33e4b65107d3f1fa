package main

import (
	"bytes"
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

	"github.com/epcached/epcached/unixsock"
)

// autostartVariable switches off that clients start a daemon.
const autostartVariable = "EPCACHE_AUTOSTART"

// connectOrStart connects, and where there is no daemon has the user's own started first, as applications do.
func (a *app) connectOrStart(ctx context.Context) (*unixsock.Client, error) {
	program := a.daemonProgram()
	if program == "" {
		return a.connect(ctx)
	}
	at := *a
	at.wait, at.waitSet = 0, true
	c, err := at.connect(ctx)
	if err == nil || !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
		return c, err
	}
	if _, there := os.Lstat(unixsock.SystemSocket); there == nil {
		return a.connect(ctx) // the system's daemon is about to come back, and its users are not to be scattered
	}
	if err := startDaemon(ctx, program); err != nil {
		var none *noDaemonError
		if c, again := a.connect(ctx); again == nil || !errors.As(again, &none) {
			return c, again // another process was faster
		}
		return nil, &noDaemonError{none.text, fmt.Sprintf("none can be started: %v", err), none}
	}
	return a.connect(ctx)
}

// daemonProgram finds what starts a daemon, beside this program or in PATH; "" where none is to be started.
func (a *app) daemonProgram() string {
	off := slices.Contains([]string{"0", "no", "off", "false"}, strings.ToLower(os.Getenv(autostartVariable)))
	if off || a.socket != "" || os.Getenv(unixsock.SocketVariable) != "" {
		return ""
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
	path, err := exec.LookPath("epcached")
	if err != nil {
		return ""
	}
	return path
}

// startDaemon returns when the daemon answers, or with the reason why there is none.
func startDaemon(ctx context.Context, program string) error {
	failed := errors.New("there is no home directory")
	for _, socket := range unixsock.UserSockets() {
		if failed = unixsock.OwnFolder(filepath.Dir(socket)); failed != nil {
			continue
		}
		var said bytes.Buffer
		cmd := exec.CommandContext(ctx, program, "--autostart", "--socket", socket)
		cmd.Stderr = &said
		if err := cmd.Run(); err != nil {
			line, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(said.String()), "epcached: "), "\n")
			if line == "" {
				line = err.Error()
			}
			return errors.New(line)
		}
		return nil
	}
	return failed
}
