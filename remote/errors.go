package remote

import (
	"errors"
	"time"
)

// The results of a call that did not succeed; errors.Is distinguishes them.
var (
	// ErrMissing: the remote answered that it does not have the object. For a look-up this is a
	// miss.
	ErrMissing = errors.New("not there")
	// ErrRefused: the remote answered 401 or 403. It counts as a miss and not as a failure of the
	// remote, because S3 answers the same for missing objects to readers that may not list.
	ErrRefused = errors.New("refused")
	// ErrUnreachable: no answer, a server's error, the budget was used up, the helper is missing or
	// crashed, or the breaker is open.
	ErrUnreachable = errors.New("unreachable")
	// ErrDamaged: the remote sent wrong bytes, of which none may be used.
	ErrDamaged = errors.New("damaged")
	// ErrUnsupported: this kind of remote does not support the call.
	ErrUnsupported = errors.New("not supported")
	// ErrLocal: the files of the caller could not be read or written.
	ErrLocal = errors.New("local error")
)

// classes are the errors as they are sent.
var classes = map[string]error{"missing": ErrMissing, "refused": ErrRefused,
	"unreachable": ErrUnreachable, "damaged": ErrDamaged, "unsupported": ErrUnsupported,
	"local": ErrLocal}

// Error says which remote failed, and how.
type Error struct {
	Class      string        // one of the keys of classes
	Remote     string        // its name
	Text       string        // the cause, with neither keys nor credentials
	RetryAfter time.Duration // the server's Retry-After; used in the background only
}

// Error names the remote and the cause.
func (e *Error) Error() string { return "remote " + e.Remote + ": " + e.Text }

// Is matches the error of the class.
func (e *Error) Is(target error) bool { return classes[e.Class] == target }

func unreachable(remote, text string) *Error {
	return &Error{Class: "unreachable", Remote: remote, Text: text}
}
