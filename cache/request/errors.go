package request

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// WorkerError returns the error of a request for a worker's failure, with the end of the compiler's
// output.
func WorkerError(err error, format string, args ...any) error {
	return CompileError(err, "", format, args...)
}

// CompileError is WorkerError with the worker's output.
func CompileError(err error, log string, format string, args ...any) error {
	switch {
	case errors.As(err, new(*apierr.Error)):
		return err
	case errors.Is(err, runtimes.ErrFilesChanging):
		return apierr.New(apierr.Busy, err, format, args...).WithHint("retry when the update is " +
			"done")
	case errors.Is(err, runtimes.ErrReplaced):
		return apierr.New(apierr.Unavailable, err, format, args...).
			WithHint("restart the application")
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return apierr.New(apierr.ClassOf(err), err, format, args...)
	case errors.Is(err, compilers.ErrOption):
		return apierr.New(apierr.BadRequest, err, format, args...)
	case errors.Is(err, compilers.ErrNotFound):
		return apierr.New(apierr.Unavailable, err, format, args...)
	}
	if f := failure.Of(err, log); f != nil {
		return f.ToError(err, format, args...)
	}
	return apierr.New(apierr.CompileFailed, err, format, args...)
}

// StoreError is the error of a request for a failure of the store.
func StoreError(err error, model string) error {
	e := apierr.New(StoreClass(err), err, "model %q", model)
	if known := (*apierr.Error)(nil); errors.As(err, &known) {
		e.Hint = known.Hint
	}
	return e
}

// UnservableError returns the error for a build without a view. made says how it was made.
func UnservableError(err error, model, made string) error {
	return apierr.New(StoreClass(err), err, "model %q: %s, but cannot be served", model, made)
}

// StoreClass returns the class of a failure of the store.
func StoreClass(err error) apierr.Class {
	class := apierr.ClassOf(err)
	if class == apierr.Internal && cas.IsDiskFull(err) {
		return apierr.NoSpace
	}
	return class
}

// ContextError is the error of a request after its caller left or its deadline passed.
func ContextError(ctx context.Context, model string) error {
	return apierr.FromContext(ctx, "model %q", model)
}

// OtherORTError returns the error of a request that waited repeatedly for builds of an ONNX Runtime
// that does not suit it.
func OtherORTError(at *Attempt, b *index.Build) error {
	return apierr.New(apierr.Busy, nil, "model %q: it is being compiled with ONNX Runtime %s, "+
		"which does not suit this request", at.Name, b.ORTVersion).WithHint("ask again")
}

// JobError returns the error of a request that waited for a job which failed.
func JobError(ctx context.Context, model string, err error) error {
	var known *apierr.Error
	var end *ClaimEnd
	switch {
	case ctx.Err() != nil:
		return ContextError(ctx, model)
	case errors.As(err, &end):
		return ClaimFailed(model, end)
	case errors.As(err, &known) && failure.FromError(known) != nil:
		return failure.RenamedError(known, model)
	case known != nil:
		return err
	}
	return apierr.New(apierr.Cancelled, err, "model %q", model)
}

// ClaimFailed returns the error of requests that waited for a claim which ended without a result,
// and that cannot get the claim themselves.
func ClaimFailed(model string, end *ClaimEnd) *apierr.Error {
	e := apierr.New(apierr.CompileFailed, end, "model %q", model).WithFact("reason", "claim ended").
		WithHint("request it with on_miss claim to compile it yourself, or load the model " +
			"without epcached")
	if end.Code != 0 {
		e.WithFact("code", fmt.Sprint(end.Code))
	}
	return e
}

// MaxHandOvers bounds how many claims a request waits for, one after the other.
const MaxHandOvers = 16

// ClaimEnd is why a claim ended without a result.
type ClaimEnd struct {
	UID  uint32
	Text string
	Code int32 // ONNX Runtime's error code, if the claimant gave up; 0: none
}

func (e *ClaimEnd) Error() string {
	if e.Code != 0 {
		return fmt.Sprintf("the claim of uid %d ended: %s (code %d)", e.UID, e.Text, e.Code)
	}
	return fmt.Sprintf("the claim of uid %d ended: %s", e.UID, e.Text)
}
