package apierr

import (
	"context"
	"fmt"
	"io/fs"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAnErrorTellsObjectAndCause(t *testing.T) {
	e := New(NotFound, fs.ErrNotExist, "model %q", "m.onnx").WithHint("name %s", "another").
		WithFact("file", "m.onnx").WithFact("offset", "7")
	require.EqualError(t, e, `model "m.onnx": file does not exist`)
	require.Equal(t, "name another", e.Hint)
	require.Equal(t, map[string]string{"file": "m.onnx", "offset": "7"}, e.Facts)
	require.ErrorIs(t, e, fs.ErrNotExist)
	require.EqualError(t, New(Busy, nil, "ask again"), "ask again")
}

func TestTheClassIsThatOfTheOutermost(t *testing.T) {
	inner := New(NoSpace, nil, "the disk is full")
	require.Equal(t, NoSpace, ClassOf(fmt.Errorf("store: %w", inner)))
	require.Equal(t, CompileFailed, ClassOf(New(CompileFailed, inner, "model")))
	require.Equal(t, Internal, ClassOf(fs.ErrNotExist))
	require.Equal(t, Cancelled, ClassOf(fmt.Errorf("read: %w", context.Canceled)))
	require.Equal(t, Deadline, ClassOf(fmt.Errorf("read: %w", context.DeadlineExceeded)))
}

// The end of a request's context stays what it is, whatever it was taken for on the way.
func TestTheEndOfAContextKeepsItsClass(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	for ctx, class := range map[context.Context]Class{cancelled: Cancelled, late: Deadline} {
		for _, err := range []error{ctx.Err(), fs.ErrClosed, New(Internal, nil, "worker"),
			New(Unavailable, ctx.Err(), "runtime"), New(CompileFailed,
				fmt.Errorf("signal: killed: %w", ctx.Err()), "model")} {
			got := Ended(ctx, err, "model %q", "m")
			require.Equal(t, class, ClassOf(got), "%v", err)
			require.EqualError(t, got, `model "m": `+ctx.Err().Error())
			require.Equal(t, err, Ended(t.Context(), err, "m"))
		}
		missing := New(NotFound, nil, "no build")
		require.Equal(t, error(missing), Ended(ctx, missing, "m"), "it was known before")
	}
	require.NoError(t, Ended(cancelled, nil, "m"))
}
