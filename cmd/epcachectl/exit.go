package main

import (
	"errors"
	"io/fs"
	"strconv"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/unixsock"
)

// The exit codes, a contract for scripts.
const (
	exitDone       = 0
	exitFailed     = 1
	exitUsage      = 2
	exitNotFound   = 3
	exitDamage     = 4
	exitNoDaemon   = 5
	exitStale      = 6
	exitNotAllowed = 7
	exitShort      = 8
	exitSignal     = 128 // and the signal's number
	exitInterrupt  = 130
)

var exitMeaning = map[int]string{
	exitDone:       "done",
	exitFailed:     "failed",
	exitUsage:      "wrong usage",
	exitNotFound:   "not found: an entry, a build or a file",
	exitDamage:     "damage",
	exitNoDaemon:   "no daemon answers",
	exitStale:      "stale: there is a build, and it must not be loaded",
	exitNotAllowed: "not allowed",
	exitShort:      "less goes than should: nothing more may",
	exitInterrupt:  "interrupted by Ctrl-C",
}

// statusHelp is the part of a verb's help that says how it exits.
func statusHelp(codes ...int) string {
	parts := make([]string, len(codes))
	for i, code := range codes {
		parts[i] = strconv.Itoa(code) + " " + exitMeaning[code]
	}
	return "\n\nExit status: " + strings.Join(parts, ", ") + "."
}

// askingCodes are those of a verb that asks the daemon for something.
var askingCodes = []int{exitDone, exitFailed, exitUsage, exitNotFound, exitNoDaemon, exitNotAllowed}

// usageError is a mistake in the call.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// exitError carries the exit code of what was reported already.
type exitError int

func (e exitError) Error() string { return exitMeaning[int(e)] }

// damageError is about something stored that is not what it should be.
type damageError struct{ error }

func (e damageError) Unwrap() error { return e.error }

// missing says in words of its own what is not there: errors.Is(err, fs.ErrNotExist) holds.
type missing string

func (m missing) Error() string { return string(m) }

func (m missing) Is(target error) bool { return target == fs.ErrNotExist }

func exitCode(err error) int {
	var usage usageError
	var done exitError
	var corrupt *cas.CorruptError
	var damaged damageError
	var stopped interruption
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &done):
		return int(done)
	case errors.As(err, &stopped):
		return stopped.status()
	case errors.Is(err, unixsock.ErrConnectionLost): // with what the two could not agree on, perhaps
		return exitNoDaemon
	case errors.As(err, &usage), errors.Is(err, unixsock.ErrBadRequest): // which only the daemon could tell to be wrong
		return exitUsage
	case errors.As(err, &corrupt), errors.As(err, &damaged):
		return exitDamage
	case errors.Is(err, unixsock.ErrNoDaemon):
		return exitNoDaemon
	case errors.Is(err, unixsock.ErrStale):
		return exitStale
	case errors.Is(err, unixsock.ErrNotAllowed), errors.Is(err, fs.ErrPermission):
		return exitNotAllowed
	case errors.Is(err, unixsock.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return exitNotFound
	}
	return exitFailed
}
