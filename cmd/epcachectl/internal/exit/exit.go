// Package exit has the exit codes of epcachectl, the errors that lead to them, and their hints.
package exit

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/modelname"
	"github.com/epcached/epcached/internal/suggest"
	"github.com/epcached/epcached/unixsock"
)

// The exit codes, a contract for scripts.
const (
	Done       = 0
	Failed     = 1
	BadUsage   = 2
	NotFound   = 3
	Damage     = 4
	NoDaemon   = 5
	Stale      = 6
	NotAllowed = 7
	Short      = 8
	signaled   = 128 // plus the signal's number
	Interrupt  = 130
)

var meaning = map[int]string{
	Done:       "done",
	Failed:     "failed",
	BadUsage:   "wrong usage",
	NotFound:   "not found",
	Damage:     "damage",
	NoDaemon:   "no daemon",
	Stale:      "stale: the build must not be loaded",
	NotAllowed: "not allowed",
	Short:      "goal not reached: the remaining builds are pinned or in use",
	Interrupt:  "interrupted",
}

// Help returns the section on exit codes in a verb's help.
func Help(codes ...int) string {
	var b strings.Builder
	b.WriteString("\n\nExit status:")
	for _, code := range codes {
		fmt.Fprintf(&b, "\n%5d  %s", code, meaning[code])
	}
	return b.String()
}

// AskingCodes are the exit codes of a verb that sends a request to the daemon.
var AskingCodes = []int{Done, Failed, BadUsage, NotFound, NoDaemon, NotAllowed}

// CheckingCodes are those of a verb that looks for damage of the store.
var CheckingCodes = []int{Done, Failed, BadUsage, Damage, NoDaemon, NotAllowed}

// WaitingCodes are those of a verb that waits for a result, which takes long.
var WaitingCodes = append(slices.Clone(AskingCodes), Interrupt)

// ServingCodes are those of a verb that may also find damaged and stale builds.
var ServingCodes = []int{Done, Failed, BadUsage, NotFound, Damage, NoDaemon, Stale, NotAllowed,
	Interrupt}

// coded is an error that leads to an exit code.
type coded struct {
	error
	code int
}

func (e coded) Unwrap() error { return e.error }

// Usage makes an error a mistake in the call.
func Usage(err error) error { return coded{err, BadUsage} }

// Damaged makes an error one about damage in a store.
func Damaged(err error) error { return coded{err, Damage} }

// Usagef is Usage of an error of its own.
func Usagef(format string, args ...any) error { return Usage(fmt.Errorf(format, args...)) }

// OneOf returns an error if a flag's value is not one of the words.
func OneOf(flag, value string, words ...string) error {
	if slices.Contains(words, value) {
		return nil
	}
	last := len(words) - 1
	return Hint(Usagef("%s %q: it must be %s or "+
		"%s", flag, value, strings.Join(words[:last], ", "), words[last]),
		suggest.Hint("", value, words))
}

// Status is an error with an exit code that was reported already.
type Status int

func (e Status) Error() string { return meaning[int(e)] }

// Missing is an error with its own text for which errors.Is(err, fs.ErrNotExist) is true.
type Missing string

func (m Missing) Error() string        { return string(m) }
func (m Missing) Is(target error) bool { return target == fs.ErrNotExist }

// Code returns the exit code that an error of a call leads to.
func Code(err error) int {
	if err == nil {
		return Done
	}
	if done, is := errors.AsType[Status](err); is {
		return int(done)
	}
	if stopped, is := errors.AsType[interruption](err); is {
		return signaled + int(stopped.signal) // as in a shell
	}
	known, is := errors.AsType[coded](err)
	_, corrupt := errors.AsType[*cas.CorruptError](err)
	switch {
	case errors.Is(err, unixsock.ErrConnectionLost):
		// perhaps with a version that is too different
		return NoDaemon
	case is:
		return known.code
	case errors.Is(err, unixsock.ErrBadRequest): // found only by the daemon
		return BadUsage
	case corrupt:
		return Damage
	case errors.Is(err, unixsock.ErrNoDaemon):
		return NoDaemon
	case errors.Is(err, unixsock.ErrStale):
		return Stale
	case errors.Is(err, unixsock.ErrNotAllowed), errors.Is(err, fs.ErrPermission):
		return NotAllowed
	case errors.Is(err, unixsock.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return NotFound
	}
	return Failed
}

// verbError says which operation on which object failed.
type verbError struct {
	verb, object string
	cause        error
}

func (e verbError) Error() string {
	return fmt.Sprintf("%s %q: %s", e.verb, e.object, e.causeText())
}

// causeText returns the cause without the object's name, which is printed before it.
func (e verbError) causeText() string {
	text := strings.TrimPrefix(e.cause.Error(), e.object+": ")
	if text == fmt.Sprintf("no entry %q", e.object) {
		return "no such entry"
	}
	name := filepath.Base(e.object)
	rest, named := strings.CutPrefix(text, fmt.Sprintf("model %q", name))
	if path, err := filepath.Abs(e.object); err == nil && !named {
		rest, named = strings.CutPrefix(text, fmt.Sprintf("model %q", modelname.Of(path, name)))
	}
	switch after, listed := strings.CutPrefix(rest, ": "); {
	case !named:
		return text
	case listed:
		return after
	case strings.HasPrefix(rest, " "):
		return "it" + rest
	}
	return text
}

// WithOperation says which operation on which object failed.
func WithOperation(verb, object string, err error) error { return verbError{verb, object, err} }

func (e verbError) Unwrap() error { return e.cause }

// WithVerb adds the verb to an error that names its object itself.
func WithVerb(verb string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", verb, err)
}

// Hints lists the hints that an error carries.
func Hints(err error) []string {
	var list []string
	if hinted, is := errors.AsType[*hintedError](err); is {
		list = append(list, hinted.hint)
	}
	if e, is := errors.AsType[*unixsock.Error](err); is && e.Hint != "" {
		list = append(list, e.Hint)
	}
	if none, is := errors.AsType[*NoDaemonError](err); is {
		list = append(list, none.Hint)
	}
	return list
}

type hintedError struct {
	error
	hint string
}

// Hint adds a hint of this program's own to an error, unless it is "".
func Hint(err error, hint string) error {
	if hint == "" {
		return err
	}
	return &hintedError{err, hint}
}

func (e *hintedError) Unwrap() error { return e.error }

// NoDaemonError says in one sentence that no daemon answers at any of the sockets.
type NoDaemonError struct {
	Text, Hint string
	Cause      error
}

func (e *NoDaemonError) Error() string { return e.Text }

// WithHint returns the error with another hint.
func (e *NoDaemonError) WithHint(hint string) error { return &NoDaemonError{e.Text, hint, e} }
func (e *NoDaemonError) Unwrap() error              { return e.Cause }

// interruption is the signal that ended a call.
type interruption struct{ signal syscall.Signal }

func (e interruption) Error() string {
	if e.signal == syscall.SIGTERM {
		return "terminated"
	}
	return "interrupted"
}

// Is reports that an interrupted call is a cancelled one.
func (e interruption) Is(target error) bool { return target == context.Canceled }

// Interruptible returns a context that ends with the first SIGINT or SIGTERM, which is then its
// cause.
func Interruptible() (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	heard := make(chan os.Signal, 1)
	signal.Notify(heard, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		select {
		case s := <-heard:
			number, _ := s.(syscall.Signal)
			cancel(interruption{number})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(heard)
		cancel(nil)
	}
}

type lateError time.Duration

func (e lateError) Error() string { return fmt.Sprintf("no result within %v", time.Duration(e)) }
func (e lateError) Unwrap() error { return context.DeadlineExceeded }

// TimeoutError replaces an error that --timeout or a signal has caused by one that says so. fate
// says what happens to the request, and how to change that; it may be nil.
func TimeoutError(ctx context.Context, err error, timeout time.Duration,
	fate func() (text, hint string)) error {
	var stopped interruption
	over, hint := error(nil), ""
	switch {
	case errors.As(err, &stopped): // reported already
		return err
	// os.ErrDeadlineExceeded alone may be the deadline of an incomplete frame.
	case timeout > 0 && (errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil &&
		errors.Is(err, os.ErrDeadlineExceeded)):
		over, hint = lateError(timeout), "allow more time with --timeout"
	case errors.Is(err, context.Canceled) && errors.As(context.Cause(ctx), &stopped):
		over = stopped
	default:
		return err
	}
	if fate != nil {
		text, more := fate()
		if text != "" {
			over = fmt.Errorf("%w %s", over, text)
		}
		if more != "" && hint != "" {
			more = "; " + more
		}
		hint += more
	}
	over = Hint(over, hint)
	if failed, is := errors.AsType[verbError](err); is {
		return WithOperation(failed.verb, failed.object, over)
	}
	return over
}
