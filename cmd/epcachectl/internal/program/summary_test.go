package program

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each session that was not served has a line that says why.
func TestRunTellsTheReasonInALine(t *testing.T) {
	const openVINO = `model "vad.onnx" does not compile: 11 EP_FAIL: ` +
		`Check 'false' failed at src/frontends/common_translators/src/` +
		`unconverted_ops_report.cpp:151:
FrontEnd API failed with OpConversionFailure:
-- Conv-11 with a message:
The input data tensor's rank has to be known (static)

Summary:
-- Conversion is failed for: Conv-11, ReduceMean-13 (the model leaves dimensions open, ` +
		`which the execution provider may need to know)`
	for name, c := range map[string]struct{ why, want string }{
		"a line": {
			"it asks for CUDAExecutionProvider, which is part of the program's own ONNX Runtime",
			"it asks for CUDAExecutionProvider, which is part of the program's own ONNX Runtime"},
		"a compiler's words": {openVINO, "Conversion is failed for: Conv-11, ReduceMean-13 " +
			"(the model leaves dimensions open, which the execution provider may need to know)"},
		"lines that end in none": {
			"E failed at run: [ONNXRuntimeError]\nKernel larger than the data\n\n\n",
			"Kernel larger than the data"},
		"more than a line": {strings.Repeat("é", 301), strings.Repeat("é", 300) + "..."},
		"nothing":          {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			g := sameSessions{Event{Outcome: "failed", Model: "/m/vad.onnx",
				Providers: []string{"CPUExecutionProvider"}, Why: c.why}, 2}
			require.Equal(t, "vad.onnx ran on CPUExecutionProvider without the cache "+
				"(2 sessions): failed: "+c.want, g.line())
		})
	}
}

func TestRunTellsOfTheMissingDaemonOnce(t *testing.T) {
	g := sameSessions{Event{Outcome: "no daemon", Model: "/m/vad.onnx",
		Providers: []string{"CPUExecutionProvider"}, Why: "no daemon: connect to /s: refused"}, 1}
	require.Equal(t, "vad.onnx ran on CPUExecutionProvider without the cache: no daemon: "+
		"connect to /s: refused", g.line())
}

// A session that ONNX Runtime refuses is reported as refused, not as unrequested.
func TestRunTellsOfASessionThatCouldNotBeMade(t *testing.T) {
	python := Event{Kind: "python"}
	imported := Event{Kind: "onnxruntime"}
	raised := Event{Kind: "raised", Model: "/m/bad.onnx",
		Why: "InvalidArgument: No graph was found in the protobuf."}
	require.Equal(t, []string{"no session was made with onnxruntime"},
		summaryOf([]Event{python, imported}, false).Notes)
	require.Equal(t, []string{"bad.onnx could not be loaded, with or without epcached: " +
		"InvalidArgument: No graph was found in the protobuf."},
		summaryOf([]Event{python, imported, raised, raised}, false).Notes)
}

// A program that asked for the CPU would not have compiled.
func TestOnlyCompilesThatTheProgramWouldHaveDoneAreSaved(t *testing.T) {
	hit := Event{Kind: "session", Outcome: "hit", CompileSeconds: 5, AcquireSeconds: 1}
	sent := hit
	sent.Sent = true
	require.InDelta(t, 4, summaryOf([]Event{hit, sent}, false).SavedSeconds, 1e-9)
}

func TestCompilesAreListedBesideSessions(t *testing.T) {
	session := Event{Kind: "session", Outcome: "hit", Model: "/m/a.onnx",
		Providers: []string{"E"}, CompileSeconds: 2}
	compile := session
	compile.Kind = "compile"
	failed := compile
	failed.Outcome, failed.Why = "bypassed", "flags"
	s := summaryOf([]Event{{Kind: "python"}, {Kind: "onnxruntime"}, session, compile, failed},
		false)
	lines := s.Lines(true)
	require.Equal(t, "3 requests: 1 bypassed, 2 hit; 4s of compiling saved", lines[0])
	require.Len(t, lines, 4)
	require.Equal(t, "a.onnx was compiled for E without the cache: bypassed: flags", lines[3])
}
