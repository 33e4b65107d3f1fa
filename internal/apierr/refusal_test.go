package apierr

import (
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
}
