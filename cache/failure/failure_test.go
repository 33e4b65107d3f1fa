package failure

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
)

func TestLongLastWordsAreCut(t *testing.T) {
	stderr := string(make([]byte, 1<<20)) + "the end"
	f := Of(&compilers.ExitError{Compiler: "X", Signal: "aborted", Name: "SIGABRT", Stderr: stderr},
		"")
	require.Less(t, len(f.Facts["stderr"]), 2*maxLastWords)
	require.Contains(t, f.Facts["stderr"], "the end")
	require.Less(t, len(f.Text), 2*maxLastWords)
}

func TestBadAllocIsAMemoryFailure(t *testing.T) {
	f := Of(&compilers.ExitError{Compiler: "X", Signal: "aborted", Name: "SIGABRT",
		Stderr: "terminate called\n  what():  std::bad_alloc\n"}, "")
	require.Equal(t, Memory, f.Reason)
	f = Of(&compilers.RefusedError{Doing: "compile", Code: 1, Text: "std::bad_alloc"}, "")
	require.Equal(t, Memory, f.Reason)
}

func TestLimitsThatAToolReportsItself(t *testing.T) {
	o := Options{}.OrDefault()
	for words, reason := range map[string]Reason{
		"std::bad_alloc": Memory,
		"MemoryError":    Memory,
		"numpy.core._exceptions._ArrayMemoryError: Unable to allocate 3.00 GiB": Memory,
		"mmap: Cannot allocate memory":                                          Memory,
		"OSError: [Errno 27] File too large":                                    OutputLimit,
		"write x_ctx.bin: No space left on device":                              OutputLimit,
		"OSError: [Errno 24] Too many open files: 'a.bin'":                      OutputLimit,
		"unsupported operator":                                                  Refused,
	} {
		for name, err := range map[string]error{
			"ONNX Runtime": &compilers.RefusedError{Doing: "compile", Code: 1, Text: words},
			"tool": &compilers.RefusedError{Doing: "compile", Code: -1,
				Text: "exit status 1: " + words},
		} {
			f := Of(err, "")
			require.Equal(t, reason, f.Reason, "%s: %s", name, words)
			require.Equal(t, string(reason), f.Facts["reason"])
			want := o.Limit
			if reason == Refused {
				want = o.Refused
			}
			require.Equal(t, want, o.holdTime(f, 1),
				"a limit is tried again soon, a refusal is not")
		}
		crash := Of(&compilers.ExitError{Compiler: "X", Code: 1,
			Stderr: "Traceback:\n" + words + "\n"}, "")
		if reason == Refused {
			reason = Crash
		}
		require.Equal(t, reason, crash.Reason, words)
	}
}

func TestALimitOfONNXRuntimeIsNotTheModelsFault(t *testing.T) {
	text := "Initializer 'w' references an ORT in-memory address marker, which is not allowed"
	for _, f := range []*Failure{
		Of(&compilers.RefusedError{Doing: "compile", Code: 1, Text: text}, ""),
		OfLoad(compilers.CheckResult{Code: 1, Text: text}),
	} {
		require.Regexp(t, "^the model is valid, but this ONNX Runtime cannot compile constants "+
			"inside bodies of If, Loop and Scan nodes: .*"+text, f.Text)
		require.Contains(t, f.Advice(), "load it without epcached")
	}
}
