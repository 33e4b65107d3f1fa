package cache

import "fmt"

// Kind says what is wrong with what was asked for.
type Kind int

// The kinds of refusal.
const (
	Malformed Kind = iota // nobody can mean it so
	Forbidden             // clients may not ask for it
	Missing               // the execution provider is not whole
)

// RefusedError says why nothing is compiled as it was asked for.
type RefusedError struct {
	Kind Kind
	Text string // for people, with the cause
	Hint string // what to do, may be empty
	Err  error  // the cause, may be nil
}

func (e *RefusedError) Error() string { return e.Text }

func (e *RefusedError) Unwrap() error { return e.Err }

func refuse(kind Kind, cause error, format string, args ...any) *RefusedError {
	e := &RefusedError{Kind: kind, Text: fmt.Sprintf(format, args...), Err: cause}
	if cause != nil {
		e.Text += ": " + cause.Error()
	}
	return e
}

func (e *RefusedError) hint(format string, args ...any) *RefusedError {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}
