package cache

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/requests"
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

	Failure *Failure // of a compile that failed; shared: read only. Else nil
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

// refused gives its class to what was refused for how it was asked for.
func refused(err error) error {
	var r *requests.Error
	if !errors.As(err, &r) {
		return err
	}
	class := BadRequest
	switch r.Kind {
	case requests.Forbidden:
		class = NotAllowed
	case requests.Missing:
		class = Unavailable
	}
	return &Error{Class: class, Text: r.Text, Hint: r.Hint, Err: r.Err}
}

// NeedFilesError answers a request whose model refers to external data that was not presented.
type NeedFilesError struct {
	Locations []string
	Members   []int // of a group: whose each location is, 0 is the first model; nil: all are that one's
}

func (e *NeedFilesError) Error() string {
	return fmt.Sprintf("the model refers to %d files of external data that were not presented", len(e.Locations))
}

// workerError gives a worker's failure its class, with the compiler's own last words in the text.
func workerError(err error, format string, args ...any) error {
	return compileError(err, "", format, args...)
}

// compileError is workerError for who has what the worker printed.
func compileError(err error, log string, format string, args ...any) error {
	switch {
	case errors.As(err, new(*Error)):
		return err
	case errors.Is(err, errMoving):
		return fail(Busy, err, format, args...).hint("ask again when the update is done")
	case errors.Is(err, errReplaced):
		return fail(Unavailable, err, format, args...).hint("restart the application")
	case errors.Is(err, context.DeadlineExceeded):
		return fail(Deadline, err, format, args...)
	case errors.Is(err, compilers.ErrOption):
		return fail(BadRequest, err, format, args...)
	case errors.Is(err, compilers.ErrNotFound):
		return fail(Unavailable, err, format, args...)
	}
	if f := failureOf(err, log); f != nil {
		return f.error(err, format, args...)
	}
	return fail(CompileFailed, err, format, args...)
}

// storeError is for what goes wrong with the daemon's own files.
func storeError(err error, model string) error {
	e := fail(storeClass(err), err, "model %q", model)
	if known := (*Error)(nil); errors.As(err, &known) {
		e.Hint = known.Hint
	}
	return e
}

// unservable is for a build that was made, as the word says, and then no view of it.
func unservable(err error, model, made string) error {
	return fail(storeClass(err), err, "model %q: %s, but cannot be served", model, made)
}

func storeClass(err error) Class {
	if known := (*Error)(nil); errors.As(err, &known) {
		return known.Class
	}
	if cas.Full(err) {
		return NoSpace
	}
	return Internal
}
