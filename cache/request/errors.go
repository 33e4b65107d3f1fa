package request

import (
	"context"
	"errors"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// WorkerError gives a worker's failure its class, with the compiler's own last words in the text.
func WorkerError(err error, format string, args ...any) error {
	return CompileError(err, "", format, args...)
}

// CompileError is workerError for who has what the worker printed.
func CompileError(err error, log string, format string, args ...any) error {
	switch {
	case errors.As(err, new(*apierr.Error)):
		return err
	case errors.Is(err, runtimes.ErrMoving):
		return apierr.New(apierr.Busy, err, format, args...).WithHint("ask again when the update is done")
	case errors.Is(err, runtimes.ErrReplaced):
		return apierr.New(apierr.Unavailable, err, format, args...).WithHint("restart the application")
	case errors.Is(err, context.DeadlineExceeded):
		return apierr.New(apierr.Deadline, err, format, args...)
	case errors.Is(err, compilers.ErrOption):
		return apierr.New(apierr.BadRequest, err, format, args...)
	case errors.Is(err, compilers.ErrNotFound):
		return apierr.New(apierr.Unavailable, err, format, args...)
	}
	if f := failure.Of(err, log); f != nil {
		return f.Refusal(err, format, args...)
	}
	return apierr.New(apierr.CompileFailed, err, format, args...)
}

// StoreError is for what goes wrong with the daemon's own files.
func StoreError(err error, model string) error {
	e := apierr.New(StoreClass(err), err, "model %q", model)
	if known := (*apierr.Error)(nil); errors.As(err, &known) {
		e.Hint = known.Hint
	}
	return e
}

// Unservable is for a build that was made, as the word says, and then no view of it.
func Unservable(err error, model, made string) error {
	return apierr.New(StoreClass(err), err, "model %q: %s, but cannot be served", model, made)
}

func StoreClass(err error) apierr.Class {
	if known := (*apierr.Error)(nil); errors.As(err, &known) {
		return known.Class
	}
	if cas.Full(err) {
		return apierr.NoSpace
	}
	return apierr.Internal
}
