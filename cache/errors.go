package cache

import (
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
