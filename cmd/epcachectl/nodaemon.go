package main

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"

	"github.com/epcached/epcached/unixsock"
)

// noDaemonError says in one sentence that no daemon answers, wherever it was looked for.
type noDaemonError struct {
	text, hint string
	cause      error
}

func (e *noDaemonError) Error() string { return e.text }

func (e *noDaemonError) Unwrap() error { return e.cause }

// noDaemon tells a daemon that does not run from one that does not answer; other errors it leaves alone.
func noDaemon(paths []string, err error) error {
	if !errors.Is(err, unixsock.ErrNoDaemon) {
		return err
	}
	where := strings.Join(paths, " or ")
	start := "start one with: epcached --runtime DIR, or name its socket with --socket or " + unixsock.SocketVariable
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return &noDaemonError{"no daemon answers at " + where + ": the socket was left by one that ended", start, err}
	case errors.Is(err, fs.ErrNotExist):
		return &noDaemonError{"no daemon answers at " + where + ": there is no such socket", start, err}
	}
	return &noDaemonError{fmt.Sprintf("the daemon at %s does not answer within %v: it is suspended, or the machine is overloaded", where, helloTimeout),
		"look at its process, and at its log: journalctl -u epcached", err}
}
