package request

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// OtherORTError refuses a request that waited for builds again and again, and may not have them
// because another ONNX Runtime made them.
func OtherORTError(at *Attempt, b *index.Build) error {
	return apierr.New(apierr.Busy, nil, "model %q: strict_ort: it is being compiled under ONNX Runtime %s",
		at.Name, b.ORTVersion).WithHint("ask again")
}

// JobError is the error of a request that waited for a job which brought nothing.
func JobError(ctx context.Context, model string, err error) error {
	var known *apierr.Error
	var end *ClaimEnd
	switch {
	case ctx.Err() != nil:
		return ContextError(ctx, model)
	case errors.As(err, &end):
		return ClaimFailed(model, end)
	case errors.As(err, &known) && failure.In(known) != nil:
		return failure.Retold(known, model)
	case known != nil:
		return err
	}
	return apierr.New(apierr.Cancelled, err, "model %q", model)
}

// ClaimFailed is the error of requests that waited for a claim which brought nothing, and cannot
// have the claim themselves.
func ClaimFailed(model string, end *ClaimEnd) *apierr.Error {
	e := apierr.New(apierr.CompileFailed, end, "model %q", model).WithFact("reason", "claim ended").
		WithHint("ask with on_miss claim to compile it yourself, or load the model without epcached")
	if end.Code != 0 {
		e.WithFact("code", fmt.Sprint(end.Code))
	}
	return e
}

// ClaimEnd is how a claim ended that brought nothing.
type ClaimEnd struct {
	UID  uint32
	Text string
	Code int32 // ONNX Runtime's, of one that was given up; 0: none
}

func (e *ClaimEnd) Error() string {
	if e.Code != 0 {
		return fmt.Sprintf("the claim of uid %d ended: %s (code %d)", e.UID, e.Text, e.Code)
	}
	return fmt.Sprintf("the claim of uid %d ended: %s", e.UID, e.Text)
}
