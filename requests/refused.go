package requests

import "fmt"

// Kind says what is wrong with what was asked for.
type Kind int

// The kinds of refusal.
const (
	Malformed Kind = iota // nobody can mean it so
	Forbidden             // clients may not ask for it
	Missing               // the execution provider is not whole
)

// Error says why nothing is compiled as it was asked for.
type Error struct {
	Kind Kind
	Text string // for people, with the cause
	Hint string // what to do, may be empty
	Err  error  // the cause, may be nil
}

func (e *Error) Error() string { return e.Text }

func (e *Error) Unwrap() error { return e.Err }

func refuse(kind Kind, cause error, format string, args ...any) *Error {
	e := &Error{Kind: kind, Text: fmt.Sprintf(format, args...), Err: cause}
	if cause != nil {
		e.Text += ": " + cause.Error()
	}
	return e
}

func (e *Error) hint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}
