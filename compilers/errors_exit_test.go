package compilers_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
)

// A library that crashes before it has reported its name leaves none to begin the message with.
func TestExitErrorsBeginWithTheCause(t *testing.T) {
	e := &compilers.ExitError{Signal: "segmentation fault", Name: "SIGSEGV", Code: -1}
	require.EqualError(t, e, "compiler crashed (SIGSEGV): segmentation fault")
	e.Compiler, e.Stderr = "XExecutionProvider", "last words\n"
	require.EqualError(t, e,
		"XExecutionProvider: compiler crashed (SIGSEGV): segmentation fault: last words")
}
