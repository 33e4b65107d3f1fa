package cache

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/epcached/epcached/compilers"
)

// Class says what a caller can do about an error. The classes are those of the protocol.
type Class int

// The classes, in the protocol's order.
const (
	NotFound Class = iota + 1
	Stale
	CompileFailed
	Busy
	Deadline
	BadModel
	BadRequest
	NotAllowed
	NoSpace
	Version
	Unavailable
	Internal
	Cancelled
)

// Error is what every method of Cache returns when it fails.
type Error struct {
	Class Class
	Text  string            // object and cause, for people
	Hint  string            // what to do, may be empty
	Facts map[string]string // for programs
	Err   error             // the cause, may be nil
}

func (e *Error) Error() string { return e.Text }

func (e *Error) Unwrap() error { return e.Err }

// ClassOf gives the class of an error, Internal for those of other packages.
func ClassOf(err error) Class {
	var e *Error
	if errors.As(err, &e) {
		return e.Class
	}
	return Internal
}

func fail(class Class, cause error, format string, args ...any) *Error {
	e := &Error{Class: class, Text: fmt.Sprintf(format, args...), Err: cause}
	if cause != nil {
		e.Text += ": " + cause.Error()
	}
	return e
}

func (e *Error) hint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

func (e *Error) fact(key, value string) *Error {
	if e.Facts == nil {
		e.Facts = make(map[string]string)
	}
	e.Facts[key] = value
	return e
}

// NeedFilesError answers a request whose model refers to external data that was not presented.
type NeedFilesError struct {
	Locations []string
}

func (e *NeedFilesError) Error() string {
	return fmt.Sprintf("the model refers to %d files of external data that were not presented", len(e.Locations))
}

// workerError gives a worker's failure its class, with the compiler's own last words in the text.
func workerError(err error, format string, args ...any) error {
	var known *Error
	var refused *compilers.RefusedError
	var exit *compilers.ExitError
	var none *compilers.NoNodesError
	switch {
	case errors.As(err, &known):
		return err
	case errors.Is(err, errMoving):
		return fail(Busy, err, format, args...).hint("ask again when the update is done")
	case errors.Is(err, errReplaced):
		return fail(Unavailable, err, format, args...).hint("restart the application")
	case errors.As(err, &none):
		return fail(CompileFailed, err, format, args...).fact("reason", "no node taken").
			hint("load the model without epcached, or choose another execution provider")
	case errors.As(err, &refused):
		return fail(CompileFailed, err, format, args...).fact("code", fmt.Sprint(refused.Code))
	case errors.As(err, &exit):
		return fail(CompileFailed, err, format, args...).fact("exit", fmt.Sprint(exit.Code)).fact("signal", exit.Signal).
			fact("stderr", exit.Stderr)
	case errors.Is(err, compilers.ErrTimeout), errors.Is(err, compilers.ErrCPU), errors.Is(err, compilers.ErrMemory), errors.Is(err, compilers.ErrOutput):
		return fail(CompileFailed, err, format, args...).fact("reason", limitName(err)).
			hint("[limits] in the daemon's configuration sets the bounds of a compile")
	case errors.Is(err, context.Canceled):
		return fail(Cancelled, err, format, args...)
	case errors.Is(err, context.DeadlineExceeded):
		return fail(Deadline, err, format, args...)
	case errors.Is(err, compilers.ErrOption):
		return fail(BadRequest, err, format, args...)
	case errors.Is(err, compilers.ErrNotFound):
		return fail(Unavailable, err, format, args...)
	}
	return fail(CompileFailed, err, format, args...)
}

// limitName names the limit that a worker reached.
func limitName(err error) string {
	for _, limit := range []error{compilers.ErrTimeout, compilers.ErrCPU, compilers.ErrMemory, compilers.ErrOutput} {
		if errors.Is(err, limit) {
			return limit.Error()
		}
	}
	return ""
}

// storeError is for what goes wrong with the daemon's own files.
func storeError(err error, model string) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fail(NoSpace, err, "model %q", model)
	}
	return fail(Internal, err, "model %q", model)
}
