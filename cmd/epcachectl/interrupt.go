package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// interruption is the signal that ended a call.
type interruption struct{ signal syscall.Signal }

func (e interruption) Error() string {
	if e.signal == syscall.SIGTERM {
		return "terminated"
	}
	return "interrupted"
}

// Is: whoever was interrupted was cancelled.
func (e interruption) Is(target error) bool { return target == context.Canceled }

// status is what a shell makes of a program that a signal ended.
func (e interruption) status() int { return exitSignal + int(e.signal) }

// interruptible gives a context that ends with the first SIGINT or SIGTERM, which is then its cause.
func interruptible() (ctx context.Context, stop func()) {
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

// endedEarly says in this program's words that --timeout is over, or that a signal came, where that is what the error comes
// from. fate tells what becomes of what was asked for, and how to have it otherwise; it may be nil.
func (a *app) endedEarly(ctx context.Context, err error, fate func() (text, hint string)) error {
	var stopped interruption
	over := error(nil)
	hint := ""
	switch {
	case errors.As(err, &stopped): // told already
		return err
	// A frame that stops in its middle has a deadline of its own, which is not the caller's.
	case a.timeout > 0 && (errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded)):
		over, hint = lateError(a.timeout), "allow more with --timeout"
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
	if hint != "" {
		over = &hintedError{over, hint}
	}
	var failed verbError
	if errors.As(err, &failed) {
		return verbError{failed.verb, failed.object, over}
	}
	return over
}

// lateError is the time after which a call was given up.
type lateError time.Duration

func (e lateError) Error() string { return fmt.Sprintf("given up after %v", time.Duration(e)) }

func (e lateError) Unwrap() error { return context.DeadlineExceeded }

// fate tells what becomes of a model's compile when its request leaves: last is what was last heard of it.
func (g *getCall) fate(last *wire.Progress) (text, hint string) {
	if last.GetPhase() == "" {
		return "", ""
	}
	during := "(" + printable(last.GetPhase()) + ")"
	if last.GetJob() == "" {
		return during, ""
	}
	follow := "epcachectl jobs follow " + printable(short(last.GetJob()))
	switch {
	case g.keep:
		return during + ": the compile goes on, as --keep-going has it", "wait for it: " + follow
	case last.GetWaiting() > 1:
		return during + ": the compile goes on, for others wait for it too", "wait for it: " + follow
	}
	return during + ": the compile ends, unless somebody else wants it", "with --keep-going it is finished all the same, and with --on-miss background it is not waited for"
}
