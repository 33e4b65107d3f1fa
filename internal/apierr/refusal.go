// Package apierr has the errors for clients: a class that says what they can do, a text, a hint,
// and facts for programs.
//
// An *Error is made where the object and the cause are known, and names each once. Class, text,
// hint and facts cross the socket; the wrapped cause, for errors.Is and errors.As, does not. Errors
// without a class are Internal. Start with New.
package apierr

import (
	"context"
	"errors"
	"fmt"
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

// Error says why a request failed.
type Error struct {
	Class Class
	Text  string            // object and cause, for users
	Hint  string            // what to do, may be empty
	Facts map[string]string // for programs
	Err   error             // the cause, may be nil
}

func (e *Error) Error() string { return e.Text }

func (e *Error) Unwrap() error { return e.Err }

// New returns an error with the formatted text, followed by the text of the cause, which may be
// nil.
func New(class Class, cause error, format string, args ...any) *Error {
	e := &Error{Class: class, Text: fmt.Sprintf(format, args...), Err: cause}
	if cause != nil {
		e.Text += ": " + cause.Error()
	}
	return e
}

// WithHint sets the remedy, and returns the error itself.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// WithFact adds a fact, and returns the error itself.
func (e *Error) WithFact(key, value string) *Error {
	if e.Facts == nil {
		e.Facts = make(map[string]string)
	}
	e.Facts[key] = value
	return e
}

// ClassOf returns the class of an error. One that has none is the end of a context, or Internal.
func ClassOf(err error) Class {
	e, is := errors.AsType[*Error](err)
	switch {
	case is:
		return e.Class
	case errors.Is(err, context.DeadlineExceeded):
		return Deadline
	case errors.Is(err, context.Canceled):
		return Cancelled
	}
	return Internal
}

// Ended returns the error of a request. If the end of the request's context has caused it, or may
// have, because it has no class, it is FromContext instead.
func Ended(ctx context.Context, err error, format string, args ...any) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	e, is := errors.AsType[*Error](err)
	if is && (e.Class == Cancelled || e.Class == Deadline) ||
		is && e.Class != Internal && !errors.Is(err, ctx.Err()) {
		return err
	}
	return FromContext(ctx, format, args...)
}

// FromContext returns the error of a request after its context has ended. The text names the
// request.
func FromContext(ctx context.Context, format string, args ...any) *Error {
	class := Cancelled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		class = Deadline
	}
	return New(class, ctx.Err(), format, args...)
}
