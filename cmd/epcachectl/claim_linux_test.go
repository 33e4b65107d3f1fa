package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// ownRuntime is a directory that looks like a runtime, with libraries that nothing loads.
func ownRuntime(t *testing.T) string {
	dir := t.TempDir()
	for _, name := range []string{"libonnxruntime.so.1.31.1",
		"libonnxruntime_providers_openvino_plugin.so", "libopenvino.so.2641", "libtbb.so",
		"notes.txt", "libtbb.so.bak"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600))
	}
	require.NoError(t, os.Symlink("libtbb.so", filepath.Join(dir, "libtbb.so.12")))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "directory.so"), 0o700))
	return dir
}

func TestClaimShowsTheLibraries(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	dir := ownRuntime(t)
	r := call(t, "get", tinyModel(t, "tiny.onnx"), "--ep", "OpenVINOExecutionProvider", "--on-miss",
		"claim", "--runtime", dir)
	require.Equal(t, exit.Done, r.code, r.err)
	a := b.first()
	require.Equal(t, wire.OnMiss_CLAIM, a.GetOnMiss())
	require.Equal(t, "1.31.1", a.GetRuntime().GetOrtVersion())
	lib := a.GetRuntime().GetEpLibraries()[0]
	require.Equal(t, filepath.Join(dir, "libonnxruntime_providers_openvino_plugin.so"),
		lib.GetPath())
	require.NotNil(t, lib.Fd)
	var beside []string
	for _, x := range lib.GetBeside() {
		beside = append(beside, x.GetLocation())
	}
	require.Equal(t, []string{"libonnxruntime.so.1.31.1", "libopenvino.so.2641", "libtbb.so",
		"libtbb.so.12", "libtbb.so.bak"}, beside)
	require.True(t, lib.GetComplete())
}

// Where the daemon does not have the libraries, get compiles under a claim by itself.
func TestGetTakesAClaimInstead(t *testing.T) {
	worker := filepath.Join(t.TempDir(), "worker")
	require.NoError(t, os.WriteFile(worker,
		[]byte("#!/bin/sh\necho last words >&2\nkill -SEGV $$\n"), 0o700))
	t.Setenv(acquire.WorkerVariable, worker)
	b := newStandIn(t)
	var asked []wire.OnMiss
	b.acquire = func(a *wire.Acquire) (unixsock.Answer, error) {
		asked = append(asked, a.GetOnMiss())
		if a.GetOnMiss() == wire.OnMiss_WAIT {
			return unixsock.Answer{}, &unixsock.Error{Class: wire.ErrorClass_UNAVAILABLE,
				Text: "not registered", Facts: map[string]string{"instead": "claim own"}}
		}
		claim := &wire.Claim{Id: "c1", Output: "0123456789abcdef_ctx.onnx", DeadlineMs: 60_000,
			Route: "compile_api"}
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "claim", Claim: claim}}, nil
	}
	b.serve()
	r := call(t, "get", tinyModel(t, "tiny.onnx"), "--ep", "OpenVINOExecutionProvider", "--runtime",
		ownRuntime(t))
	require.Equal(t, []wire.OnMiss{wire.OnMiss_WAIT, wire.OnMiss_CLAIM}, asked)
	require.Contains(t, r.err, "last words", "the worker was started")
	require.Len(t, b.changed(), 1, "and the claim given up")
}

func TestClaimWithCrashingCompiler(t *testing.T) {
	worker := filepath.Join(t.TempDir(), "worker")
	require.NoError(t,
		os.WriteFile(worker, []byte("#!/bin/sh\necho last words >&2\nkill -SEGV $$\n"), 0o700))
	t.Setenv(acquire.WorkerVariable, worker)
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		claim := &wire.Claim{Id: "c1", Output: "0123456789abcdef_ctx.onnx", DeadlineMs: 60_000,
			Route: "compile_api"}
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "claim", Claim: claim}}, nil
	}
	b.serve()
	r := call(t, "get", tinyModel(t, "tiny.onnx"), "--ep", "OpenVINOExecutionProvider", "--on-miss",
		"claim", "--runtime", ownRuntime(t))
	require.Equal(t, exit.Failed, r.code)
	require.Contains(t, r.err, "last words")
	require.Len(t, b.changed(), 1)
	require.Contains(t, b.changed()[0], "give up c1: ")
	require.Contains(t, b.changed()[0], "last words", "waiters get the reason")
}

func TestClaimWithoutARuntime(t *testing.T) {
	r := call(t, "get", tinyModel(t, "tiny.onnx"), "--ep", "OpenVINOExecutionProvider", "--on-miss",
		"claim", "--runtime", t.TempDir())
	require.NotEqual(t, exit.Done, r.code)
	require.Contains(t, r.err, "libonnxruntime.so")
}

// standInWorker compiles as the stand-in does.
type standInWorker struct{ *standin.Compiler }

func (standInWorker) Close() error { return nil }

// claimed calls get with libraries of its own, of a daemon that refuses the put, and gives the
// files in --out.
func claimed(t *testing.T, b *standIn, refused error, args ...string) (r result, out []string) {
	t.Helper()
	defer func(was func() acquire.Worker) { acquire.NewWorker = was }(acquire.NewWorker)
	acquire.NewWorker = func() acquire.Worker { return standInWorker{standin.New()} }
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		claim := &wire.Claim{Id: "c1", Output: "0123456789abcdef_ctx.onnx", DeadlineMs: 60_000,
			Route: "compile_api"}
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "claim", Claim: claim}}, nil
	}
	b.put = func(*wire.Put) (unixsock.Answer, error) {
		return unixsock.Answer{}, refused
	}
	b.serve()
	runtime, dir := t.TempDir(), filepath.Join(t.TempDir(), "out")
	_, err := standin.Library(runtime, "1.31.1", standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	t.Setenv("TMPDIR", t.TempDir())
	all := append([]string{"get", tinyModel(t, "tiny.onnx"), "--ep", standin.EP, "--on-miss",
		"claim", "--runtime", runtime}, args...)
	for i := range all {
		all[i] = strings.ReplaceAll(all[i], "OUT", dir)
	}
	r = call(t, all...)
	entries, _ := os.ReadDir(dir) // where nothing was written there is none
	for _, e := range entries {
		out = append(out, e.Name())
	}
	left, err := os.ReadDir(os.TempDir())
	require.NoError(t, err)
	require.Empty(t, left, "what was compiled here")
	return r, out
}

// A result without space in the store is written to --out all the same.
func TestClaimWithoutRoomIsCopiedOut(t *testing.T) {
	b := newStandIn(t)
	refused := &unixsock.Error{Class: wire.ErrorClass_NO_SPACE,
		Text: "it takes 3 MiB on disk, and the whole budget is 1 MiB"}
	r, out := claimed(t, b, refused, "--out", "OUT")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Contains(t, r.err, "not stored: it takes 3 MiB on disk, and the whole budget is 1 MiB")
	require.Contains(t, r.out, "compiled ")
	require.Contains(t, out, "0123456789abcdef_ctx.onnx")
	require.Len(t, out, 2, "with its sidecar")
	require.Len(t, b.changed(), 1, "the claim is given up")
}
