package unixsock

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"strings"
	"unicode/utf8"

	"github.com/epcached/epcached/unixsock/wire"
)

// class is a sentinel for one error class: errors.Is(err, ErrNotFound) holds for every *Error of
// that class, on both ends of the socket.
type class wire.ErrorClass

func (c class) Error() string { return classText[wire.ErrorClass(c)] }

// The classes of errors; wire/epcached.proto says what each means.
var (
	ErrNotFound      error = class(wire.ErrorClass_NOT_FOUND)
	ErrStale         error = class(wire.ErrorClass_STALE)
	ErrCompileFailed error = class(wire.ErrorClass_COMPILE_FAILED)
	ErrBusy          error = class(wire.ErrorClass_BUSY)
	ErrDeadline      error = class(wire.ErrorClass_DEADLINE)
	ErrBadModel      error = class(wire.ErrorClass_BAD_MODEL)
	ErrBadRequest    error = class(wire.ErrorClass_BAD_REQUEST)
	ErrNotAllowed    error = class(wire.ErrorClass_NOT_ALLOWED)
	ErrNoSpace       error = class(wire.ErrorClass_NO_SPACE)
	ErrVersion       error = class(wire.ErrorClass_VERSION)
	ErrUnavailable   error = class(wire.ErrorClass_UNAVAILABLE)
	ErrInternal      error = class(wire.ErrorClass_INTERNAL)
	ErrCancelled     error = class(wire.ErrorClass_CANCELLED)
)

var classText = map[wire.ErrorClass]string{
	wire.ErrorClass_NOT_FOUND:      "not found",
	wire.ErrorClass_STALE:          "stale",
	wire.ErrorClass_COMPILE_FAILED: "compile failed",
	wire.ErrorClass_BUSY:           "busy",
	wire.ErrorClass_DEADLINE:       "deadline exceeded",
	wire.ErrorClass_BAD_MODEL:      "bad model",
	wire.ErrorClass_BAD_REQUEST:    "bad request",
	wire.ErrorClass_NOT_ALLOWED:    "not allowed",
	wire.ErrorClass_NO_SPACE:       "no space left",
	wire.ErrorClass_VERSION:        "not supported by this version",
	wire.ErrorClass_UNAVAILABLE:    "not available here",
	wire.ErrorClass_INTERNAL:       "internal error",
	wire.ErrorClass_CANCELLED:      "cancelled",
}

// Errors of a client about the connection itself; they never cross it.
var (
	ErrNoDaemon       = errors.New("no daemon answers")
	ErrConnectionLost = errors.New("the daemon closed the connection")
	ErrProtocol       = errors.New("the other end violates the protocol")
)

// Error is an error that crosses the socket.
type Error struct {
	Class wire.ErrorClass   // errors.Is compares it: ErrNotFound and its like
	Text  string            // for users: object and cause, lower case
	Hint  string            // what to do; may be empty
	Facts map[string]string // "request_key", "build", "code", "file", "field", "offset", ...
	Err   error             // the cause; not sent
}

// Error returns the text, or the class if there is none.
func (e *Error) Error() string {
	return cmp.Or(e.Text, class(e.Class).Error())
}

// Unwrap returns the cause, on the end where the error was made.
func (e *Error) Unwrap() error { return e.Err }

// Is reports whether target is the sentinel of the error's class, or the equivalent error of
// package context.
func (e *Error) Is(target error) bool {
	switch target {
	case context.Canceled:
		return e.Class == wire.ErrorClass_CANCELLED
	case context.DeadlineExceeded:
		return e.Class == wire.ErrorClass_DEADLINE
	}
	c, ok := target.(class)
	return ok && wire.ErrorClass(c) == e.Class
}

// ClassOf returns the class of any error, and INTERNAL for one that has none.
func ClassOf(err error) wire.ErrorClass {
	if e, is := errors.AsType[*Error](err); is {
		return e.Class
	}
	if c, is := errors.AsType[class](err); is {
		return wire.ErrorClass(c)
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return wire.ErrorClass_DEADLINE
	case errors.Is(err, context.Canceled):
		return wire.ErrorClass_CANCELLED
	}
	return wire.ErrorClass_INTERNAL
}

// maxErrorText bounds an error with the compiler's output, so that it fits into a frame.
const maxErrorText = 64 << 10

// toWire converts an error of a backend for the client. It omits the text of an internal error,
// which may name files and libraries that the client may not know.
func toWire(err error) *wire.Error {
	e, is := errors.AsType[*Error](err)
	class := ClassOf(err)
	if !is && class == wire.ErrorClass_INTERNAL {
		return &wire.Error{Class: class, Text: "internal error", Hint: "the daemon's log says more"}
	}
	w := &wire.Error{Class: class, Text: cut(err.Error(), maxErrorText)}
	if is {
		w.Hint, w.Facts = cut(e.Hint, maxErrorText), boundFacts(e.Facts)
	}
	return w
}

// fromWire treats an unknown class of a later version as an internal error.
func fromWire(w *wire.Error) *Error {
	class := w.GetClass()
	if classText[class] == "" {
		class = wire.ErrorClass_INTERNAL
	}
	return &Error{Class: class, Text: w.GetText(), Hint: w.GetHint(),
		Facts: maps.Clone(w.GetFacts())}
}

func boundFacts(facts map[string]string) map[string]string {
	if len(facts) == 0 {
		return nil
	}
	bounded := make(map[string]string, len(facts))
	for name, value := range facts {
		if len(bounded) == 64 {
			break
		}
		bounded[cut(name, 256)] = cut(value, 4<<10)
	}
	return bounded
}

// cut shortens text to at most n bytes, at the boundary of a character, and makes it valid UTF-8:
// because protobuf refuses other strings, and compilers may print any bytes.
func cut(text string, n int) string {
	if len(text) > n {
		for n > 0 && !utf8.RuneStart(text[n]) {
			n--
		}
		text = text[:n]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
