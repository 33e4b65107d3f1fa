package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/compilers/tinymodel"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

const ep = "--ep=StandInExecutionProvider"

func TestGetPrintsOneLine(t *testing.T) {
	newStandIn(t).serve()
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "get", model, ep)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Regexp(t,
		`^hit `+model+
			`: StandInExecutionProvider build cdcdcdcdcdcd, optimal, `+
			`12 B in \S+ \(compiled in 2s\)\n$`, r.out)
	require.Empty(t, r.err, "nothing to report, and no terminal")
}

// The daemon asks the runtime about a build that it fetched, which is another phase.
func TestGetSaysThatABuildWasFetched(t *testing.T) {
	b := newStandIn(t)
	b.progress = &wire.Progress{Phase: "fetching"}
	b.serve()
	model := tinyModel(t, "a.onnx")
	require.Regexp(t, "^fetched "+model+": ", call(t, "get", model, ep).out)
}

func TestGetJSON(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	r := call(t, "get", tinyModel(t, "a.onnx"), tinyModel(t, "b.onnx"), ep, "--json")
	require.Equal(t, exit.Done, r.code, r.err)
	var list []map[string]any
	require.NoError(t, json.Unmarshal([]byte(r.out), &list))
	require.Len(t, list, 2)
	var names []string
	for name := range list[0] {
		names = append(names, name)
	}
	require.ElementsMatch(t,
		[]string{"model", "outcome", "request_key", "build", "model_digest", "ep", "sdk_version",
			"hardware_architecture", "compatibility",
			"view", "graph", "files", "provider_options", "session_options", "compile_seconds",
			"elapsed_seconds", "why",
			"unkept", "job", "member", "members", "warnings", "dry_run", "runtime",
			"ep_libraries"}, names)
	require.Equal(t, "f00d/0123456789abcdef_ctx.onnx", list[0]["graph"])
	require.Equal(t,
		map[string]any{"ep.context_enable": "0", "graph_optimization_level": "disable_all"},
		list[0]["session_options"])
	require.Equal(t, map[string]any{"StandInExecutionProvider": map[string]any{}},
		list[0]["provider_options"])
	require.ElementsMatch(t, []string{"name", "size", "digest"},
		keysOf(list[0]["files"].([]any)[0].(map[string]any)))
	b.set(func() { // others, for the first may still be being sent
		var files []*wire.File
		for _, f := range b.files {
			files = append(files, &wire.File{Name: f.GetName(), Size: f.GetSize()})
		}
		b.files = files
	})
	unkept := call(t, "get", tinyModel(t, "a.onnx"), ep, "--json")
	require.Contains(t, unkept.out, `"files"`, unkept.err)
	require.Contains(t, unkept.out, `"digest": ""`, "of what is not kept there is none")
}

func keysOf(m map[string]any) []string { return slices.Sorted(maps.Keys(m)) }

func TestGetSendsTheFlags(t *testing.T) {
	b, runtime := newStandIn(t), t.TempDir()
	b.serve()
	r := call(t, "get", tinyModel(t, "tiny.onnx"), "--ep", "A:npu", "--option", "one=1",
		"--option=x=a=b", "--ep", "B", "--option", "two=2", "--option", "A/three=3",
		"--session-option", "session.x=y", "--dim", "batch=4",
		"--runtime", runtime, "--embed", "--optimization-level", "basic",
		"--initializers-file", "rest.bin", "--initializers-threshold", "100", "--keep-initializers",
		"--complete",
		"--on-miss", "refresh", "--store", "user", "--timeout", "1h")
	require.Equal(t, exit.Done, r.code, r.err)
	a := b.first()
	require.Equal(t, "tiny.onnx", a.GetModel().GetName())
	require.True(t, filepath.IsAbs(a.GetModel().GetPath()), "the daemon decides who sees it")
	require.Len(t, a.GetEps(), 2)
	require.Equal(t, "A", a.GetEps()[0].GetName())
	require.Equal(t, "NPU", a.GetEps()[0].GetDevices()[0].GetType())
	require.Equal(t, map[string]string{"one": "1", "x": "a=b", "three": "3"},
		a.GetEps()[0].GetOptions())
	require.Equal(t, map[string]string{"two": "2"}, a.GetEps()[1].GetOptions())
	require.Equal(t, map[string]string{"session.x": "y"}, a.GetSessionOptions())
	require.Equal(t, map[string]int64{"batch": 4}, a.GetFreeDimensions())
	require.True(t, filepath.IsAbs(a.GetRuntime().GetDirectory()))
	require.True(t, a.GetEmbed())
	require.Equal(t, "basic", a.GetGraphOptimizationLevel())
	require.Equal(t, wire.OnMiss_REFRESH, a.GetOnMiss())
	require.Equal(t, "user", a.GetStore())
	o := a.GetOutput()
	require.Equal(t, "rest.bin", o.GetExternalInitializersFile())
	require.EqualValues(t, 100, o.GetExternalInitializersThreshold())
	require.True(t, o.GetKeepInitializersInSource())
	require.True(t, o.GetComplete())
}

// A program may have another ONNX Runtime than the daemon's runtime.
func TestGetSendsTheProgramsOnnxRuntime(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	r := call(t, "get", tinyModel(t, "tiny.onnx"), ep, "--ort-version", "1.30.0")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t, "1.30.0", b.first().GetRuntime().GetOrtVersion())
	require.Empty(t, b.first().GetRuntime().GetDirectory())
}

// The program registers the plugin library of the runtime that the build is for.
func TestGetNamesTheRuntimeAndItsLibraries(t *testing.T) {
	b := newStandIn(t)
	dir := t.TempDir()
	for _, name := range []string{"libonnxruntime.so.1.31.1",
		"libonnxruntime_providers_openvino_plugin.so"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	const name = "OpenVINOExecutionProvider"
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "passthrough", Runtime: dir,
			ProviderOptions: map[string]*wire.StringMap{name: {}}}}, nil
	}
	b.serve()
	list := parseJSON(t, call(t, "get", tinyModel(t, "tiny.onnx"), ep, "--json"))
	require.Equal(t, dir, jsonAt(t, list, 0, "runtime"))
	require.Equal(t, filepath.Join(dir, "libonnxruntime_providers_openvino_plugin.so"),
		jsonAt(t, list, 0, "ep_libraries", name))
}

func TestGetNamesADeviceByItsIdsAndMetadata(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	r := call(t, "get", tinyModel(t, "tiny.onnx"), "--ep",
		"A:npu,vendor=0x8086,device=25662,is_virtual=1,name=a=b", "--ep", "B:,device_id=1", "--ep",
		"C:device=0x643e")
	require.Equal(t, exit.Done, r.code, r.err)
	eps := b.first().GetEps()
	require.Nil(t, b.first().GetOutput())
	require.Equal(t, "NPU", eps[0].GetDevices()[0].GetType())
	require.EqualValues(t, 0x8086, eps[0].GetDevices()[0].GetVendorId())
	require.EqualValues(t, 0x643e, eps[0].GetDevices()[0].GetDeviceId())
	require.EqualValues(t, 0x643e, eps[2].GetDevices()[0].GetDeviceId())
	require.Empty(t, eps[2].GetDevices()[0].GetType())
	require.Equal(t, map[string]string{"is_virtual": "1", "name": "a=b"},
		eps[0].GetDevices()[0].GetMetadata())
	require.Empty(t, eps[1].GetDevices()[0].GetType())
	require.Equal(t, map[string]string{"device_id": "1"}, eps[1].GetDevices()[0].GetMetadata())
}

func TestGetOptionBeforeTheOnlyEP(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	r := call(t, "get", tinyModel(t, "tiny.onnx"), "--option", "one=1", ep)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t, map[string]string{"one": "1"}, b.first().GetEps()[0].GetOptions())
}

// Mistakes in the call are reported before a daemon is looked for.
func TestGetUsage(t *testing.T) {
	t.Setenv(unixsock.SocketVariable, filepath.Join(t.TempDir(), "none"))
	cases := map[string]struct {
		args []string
		says string
	}{
		"no model": {[]string{ep}, "no model"},
		"no EP to claim for": {[]string{"m", "--on-miss", "claim", "--runtime", "rt"},
			"no --ep"},
		"level without EP": {[]string{"m", "--optimization-level", "9"},
			"--optimization-level"},
		"EP without name":     {[]string{"m", "--ep", ":CPU"}, `":CPU" is not EP, EP:TYPE`},
		"device without name": {[]string{"m", "--ep", "A:"}, `"A:" is not EP, EP:TYPE`},
		"metadata of nothing": {[]string{"m", "--ep", "A:NPU,"}, `"A:NPU," is not EP, EP:TYPE`},
		"no id": {[]string{"m", "--ep", "A:NPU,device=x"},
			"device=x is not an id, such as 0x8086"},
		"id 0":                 {[]string{"m", "--ep", "A:NPU,vendor=0"}, "vendor=0 is not an id"},
		"metadata without =":   {[]string{"m", "--ep", "A:NPU,x"}, `"x" is not K=V`},
		"option without value": {[]string{"m", ep, "--option", "x"}, `"x" is not K=V`},
		"option of whom": {[]string{"m", "--option", "x=1", ep, "--ep", "B"},
			"before the first of several --ep"},
		"option of nobody": {[]string{"m", ep, "--option", "C/x=1"}, "there is no --ep C"},
		"option twice": {[]string{"m", ep, "--option", "x=1", "--option", "x=2"},
			"given twice"},
		"dim without number": {[]string{"m", ep, "--dim", "batch=all"}, "is not NAME=N"},
		"dim of zero":        {[]string{"m", ep, "--dim", "batch=0"}, "is not NAME=N"},
		"level": {[]string{"m", ep, "--optimization-level", "9"},
			"--optimization-level"},
		"plain without a program": {[]string{"m", ep, "--or-plain"}, "needs a program"},
		"ort version":             {[]string{"m", ep, "--ort-version", "new"}, "is not a version"},
		"store":                   {[]string{"m", ep, "--store", "mine"}, "--store"},
		"on-miss":                 {[]string{"m", ep, "--on-miss", "maybe"}, `--on-miss "maybe"`},
		"claim":                   {[]string{"m", ep, "--on-miss", "claim"}, "needs --runtime"},
		"claim of a group": {[]string{"m", "n", ep, "--share", "--on-miss", "claim",
			"--runtime", "rt"}, "takes one model"},
		"share":                 {[]string{"m", ep, "--share"}, "two models or more"},
		"unknown flag":          {[]string{"m", ep, "--frobnicate"}, "frobnicate"},
		"no program":            {[]string{"m", ep, "--"}, "no program after --"},
		"program without place": {[]string{"m", ep, "--", "ls"}, "no {}"},
		"program, which of two": {[]string{"m", "n", ep, "--", "ls", "--m={}"},
			"it does not say which"},
		"json and program": {[]string{"m", ep, "--json", "--", "ls", "{}"}, "--json"},
		"negative timeout": {[]string{"m", ep, "--timeout", "-1s"}, "--timeout"},
		"wait without end": {[]string{"m", ep, "--wait", "1h"}, "--wait"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r := call(t, append([]string{"get"}, tc.args...)...)
			require.Equal(t, exit.BadUsage, r.code, r.err)
			require.Contains(t, r.err, "epcachectl: ")
			require.Contains(t, r.err, tc.says)
			if name != "json and program" {
				require.Empty(t, r.out)
			}
		})
	}
}

func TestGetExitCodes(t *testing.T) {
	codes := map[wire.ErrorClass]int{
		wire.ErrorClass_NOT_FOUND: exit.NotFound, wire.ErrorClass_STALE: exit.Stale,
		wire.ErrorClass_NOT_ALLOWED:    exit.NotAllowed,
		wire.ErrorClass_COMPILE_FAILED: exit.Failed, wire.ErrorClass_BAD_MODEL: exit.Failed,
		wire.ErrorClass_UNAVAILABLE: exit.Failed,
		wire.ErrorClass_BAD_REQUEST: exit.BadUsage,
	}
	for class, code := range codes {
		b := newStandIn(t)
		b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
			return unixsock.Answer{},
				&unixsock.Error{Class: class, Text: "no such luck", Hint: "try harder"}
		}
		b.serve()
		model := tinyModel(t, "tiny.onnx")
		r := call(t, "get", model, ep, "--on-miss=fail")
		require.Equal(t, code, r.code)
		hint := "try harder"
		if class == wire.ErrorClass_NOT_FOUND {
			hint = "compile it: epcachectl get --ep StandInExecutionProvider " + model
		}
		require.Equal(t,
			fmt.Sprintf("epcachectl: get %q: no such luck\nepcachectl: hint: %s\n", model, hint),
			r.err)
		require.Empty(t, r.out)

		list := parseJSON(t, call(t, "get", model, ep, "--on-miss=fail", "--json"))
		require.Equal(t, hint, jsonAt(t, list, 0, "hint"), "a script gets what a person gets")
	}
	t.Run("no daemon", func(t *testing.T) {
		t.Setenv(unixsock.SocketVariable, filepath.Join(t.TempDir(), "none"))
		r := call(t, "get", tinyModel(t, "tiny.onnx"), ep, "--wait=0")
		require.Equal(t, exit.NoDaemon, r.code)
		require.Contains(t, r.err, "no daemon answers at ")
		require.Contains(t, r.err, "epcachectl: hint: start one")
	})
}

// The command in the hint has the request key of the miss.
func TestHintHasAllFlagsOfTheRequest(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{},
			&unixsock.Error{Class: wire.ErrorClass_NOT_FOUND, Text: "no build"}
	}
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	flags := "--ep StandInExecutionProvider:NPU --option a=1 --session-option b=2 --dim batch=1 " +
		"--runtime " + t.TempDir() + " " +
		"--ort-version 1.31.1 --optimization-level basic --route session_options --store user " +
		"--initializers-file rest.bin --initializers-threshold 64 " +
		"--verify-output 0.01 --embed --strict-ort --keep-initializers --complete"
	r := call(t, append([]string{"get", model, "--on-miss=fail"}, strings.Fields(flags)...)...)
	require.Equal(t, exit.NotFound, r.code, r.err)
	require.Contains(t, r.err, "hint: compile it: epcachectl get "+flags+" "+model+"\n")
	for _, name := range (&acquire.Request{}).FlagNames() {
		require.Contains(t, flags+" ", "--"+name+" ", "the test leaves out a flag")
	}
}

func TestValuesThatNoRequestHas(t *testing.T) {
	for _, flag := range []string{"--route=later", "--verify-output=-1", "--verify-output=nan",
		"--verify-output=inf", "--optimization-level=most", "--store=all"} {
		require.Equal(t, exit.BadUsage, call(t, "get", "model.onnx", ep, flag).code, flag)
	}
}

func TestTimeoutsAreReportedAsTimeouts(t *testing.T) {
	b := newStandIn(t)
	over := make(chan struct{})
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		<-over
		return unixsock.Answer{},
			&unixsock.Error{Class: wire.ErrorClass_CANCELLED, Text: "cancelled"}
	}
	b.serve()
	t.Cleanup(func() { close(over) })
	r := call(t, "get", tinyModel(t, "tiny.onnx"), ep, "--timeout", "100ms")
	require.Equal(t, exit.Failed, r.code)
	require.Regexp(t,
		`^epcachectl: get ".*tiny.onnx": no result within 100ms\nepcachectl: hint: `+
			`allow more time with --timeout\n$`, r.err)
}

func TestCounted(t *testing.T) {
	for want, n := range map[string]int{"0 entries": 0, "1 entry": 1, "2 entries": 2} {
		require.Equal(t, want, term.Count(n, "entry"))
	}
	require.Equal(t, []string{"1 miss", "2 misses", "1 hit", "2 hits"},
		[]string{term.Count(1, "miss"), term.Count(2, "miss"), term.Count(1, "hit"),
			term.Count(2, "hit")})
}

func TestDryRunWithAnUnknownOnMiss(t *testing.T) {
	require.Equal(t, exit.BadUsage, call(t, "get", "model.onnx", ep, "-n", "--on-miss=later").code)
}

// One model that fails does not keep the others from their places.
func TestGetSeveralOneMissing(t *testing.T) {
	newStandIn(t).serve()
	missing := filepath.Join(t.TempDir(), "missing.onnx")
	r := call(t, "get", tinyModel(t, "a.onnx"), missing, tinyModel(t, "c.onnx"), ep, "--json")
	require.Equal(t, exit.NotFound, r.code)
	require.Contains(t, r.err, "missing.onnx")
	var list []map[string]any
	require.NoError(t, json.Unmarshal([]byte(r.out), &list))
	require.Len(t, list, 3)
	require.Equal(t, "failed", list[1]["outcome"])
	require.Equal(t, "hit", list[2]["outcome"])
}

func TestGetDryRun(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	out := filepath.Join(t.TempDir(), "out")
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "get", model, ep, "-n", "--out", out)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t, wire.OnMiss_FAIL, b.first().GetOnMiss())
	require.Contains(t, r.out, "would write "+out+"/0123456789abcdef_ctx.onnx\n")
	require.NoDirExists(t, out)
	for _, onMiss := range []string{"refresh", "bypass"} {
		r = call(t, "get", model, ep, "-n", "--on-miss", onMiss)
		require.Equal(t, result{exit.Done, "would compile " + model + "\n", ""}, r, onMiss)
	}
	b.set(func() {
		b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
			return unixsock.Answer{}, &unixsock.Error{Class: wire.ErrorClass_NOT_FOUND}
		}
	})
	r = call(t, "get", model, ep, "-n", "--out", out)
	require.Equal(t, result{exit.Done, "would compile " + model + "\n", ""}, r)
	r = call(t, "get", model, ep, "-n", "--on-miss", "fail")
	require.Equal(t, exit.NotFound, r.code, "it would not be compiled")
	b.set(func() {
		b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
			return unixsock.Answer{},
				&unixsock.Error{Class: wire.ErrorClass_NOT_FOUND, Text: "it crashes",
					Hint: "try later", Facts: map[string]string{"reason": "crash"}}
		}
	})
	r = call(t, "get", model, ep, "-n")
	require.Equal(t, exit.NotFound, r.code, "it would not be compiled")
	require.Contains(t, r.err, "it crashes")
	require.Contains(t, r.err, "try later")
	r = call(t, "get", model, ep, "-n", "--on-miss", "refresh")
	require.Equal(t, exit.Done, r.code, "it would be tried again")
}

func TestGetOut(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	out := filepath.Join(t.TempDir(), "new", "out")
	model := tinyModel(t, "tiny.onnx")
	get := func(more ...string) result {
		return call(t, append([]string{"get", model, ep, "--out", out}, more...)...)
	}
	content := func(name string) string {
		text, err := os.ReadFile(filepath.Join(out, name))
		require.NoError(t, err)
		return string(text)
	}
	wrote := get()
	require.Equal(t, exit.Done, wrote.code)
	for _, name := range []string{"0123456789abcdef_ctx.onnx", "sub/weights.bin"} {
		require.Contains(t, wrote.out, "\nwrote "+filepath.Join(out, name)+"\n")
	}
	require.Equal(t, "graph", content("0123456789abcdef_ctx.onnx"))
	require.Equal(t, "weights", content("sub/weights.bin"),
		"under the name that the graph refers to it by")

	before, err := os.Stat(filepath.Join(out, "sub/weights.bin"))
	require.NoError(t, err)
	same := get()
	require.Equal(t, exit.Done, same.code, "the same again is no conflict")
	require.Contains(t, same.out, "exists already: "+filepath.Join(out, "sub/weights.bin")+"\n")
	after, err := os.Stat(filepath.Join(out, "sub/weights.bin"))
	require.NoError(t, err)
	require.True(t, os.SameFile(before, after), "and writes nothing")

	require.NoError(t,
		os.WriteFile(filepath.Join(out, "sub/weights.bin"), []byte("WEIGHTS"), 0o600))
	r := get()
	require.Equal(t, exit.Failed, r.code)
	require.Contains(t, r.err, "exists and differs\nepcachectl: hint: replace it with -f")
	require.Equal(t, "WEIGHTS", content("sub/weights.bin"))
	require.Equal(t, exit.Done, get("-f").code)
	require.Equal(t, "weights", content("sub/weights.bin"))

	left, err := filepath.Glob(filepath.Join(out, "*", ".epcachectl-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// A call that ends at any file, say because it is killed, leaves no graph without its binary, and
// with -f none beside the binary of another build.
func TestGetOutWritesTheGraphLast(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	slices.SortFunc(b.files, func(a, c *wire.File) int { // the graph first, as daemons sort
		return strings.Compare(a.GetName(), c.GetName())
	})
	model, graph := tinyModel(t, "tiny.onnx"), filepath.Base(b.files[0].GetName())
	weights := filepath.Join(b.dir, b.id, "sub/weights.bin")
	require.NoError(t, os.Chmod(weights, 0o600))
	require.NoError(t, os.WriteFile(weights, []byte("damaged"), 0o600))
	out := t.TempDir()
	r := call(t, "get", model, ep, "--out", out)
	require.Equal(t, exit.Damage, r.code, r.err)
	require.NoFileExists(t, filepath.Join(out, graph))

	require.NoError(t, os.WriteFile(filepath.Join(out, graph), []byte("other graph"), 0o600))
	r = call(t, "get", model, ep, "--out", out, "-f")
	require.Equal(t, exit.Damage, r.code, r.err)
	require.NoFileExists(t, filepath.Join(out, graph), "its binary may be replaced already")

	require.NoError(t, os.WriteFile(weights, []byte("weights"), 0o600))
	r = call(t, "get", model, ep, "--out", out)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Regexp(t, `(?s)wrote \S*weights\.bin\n.*wrote \S*_ctx\.onnx\n`, r.out)
}

// Copied files are compared with their digests before they get their names.
func TestGetOutDamaged(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	path := filepath.Join(b.dir, b.files[0].GetName())
	require.NoError(t, os.Chmod(path, 0o600))
	require.NoError(t,
		os.WriteFile(path, []byte(strings.Repeat("x", int(b.files[0].GetSize()))), 0o600))
	out := t.TempDir()
	r := call(t, "get", tinyModel(t, "tiny.onnx"), ep, "--out", out)
	require.Equal(t, exit.Damage, r.code, r.err)
	require.NoFileExists(t, filepath.Join(out, filepath.Base(path)))
}

func TestGetOutOutsideTheView(t *testing.T) {
	for _, name := range []string{"../../etc/passwd", "/etc/passwd", "elsewhere/x",
		"f00d/../../x"} {
		b := newStandIn(t)
		b.files[0].Name = name
		b.serve()
		r := call(t, "get", tinyModel(t, "tiny.onnx"), ep, "--out", t.TempDir())
		require.Equal(t, exit.Failed, r.code)
		require.Contains(t, r.err, "the daemon names a file")
	}
}

func TestGetPassthrough(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "passthrough",
			Compatibility: "optimal"}}, nil
	}
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "get", model, ep)
	require.Equal(t,
		result{exit.Done, "passthrough " + model +
			": it is compiled already, optimal; load the file itself\n", ""}, r)
}

func TestGetPassthroughThatDoesNotLoad(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "passthrough",
			Compatibility:       "unsupported",
			CompatibilityReason: "it does not load: no"}}, nil
	}
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "get", model, ep)
	require.Equal(t,
		result{exit.Done, "passthrough " + model +
			": it is compiled already, unsupported: it does not load: no\n", ""}, r)
}

// A session does not load a compiled model without the files that it refers to.
func TestGetPassthroughWithoutItsContextBinary(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "passthrough",
			Compatibility: "unknown"}}, nil
	}
	b.serve()
	dir := t.TempDir()
	model := compiledModel(t, dir)
	r := call(t, "get", model, ep)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t,
		"passthrough "+model+
			": it is compiled already, whether it loads here is unknown; load the file itself\n",
		r.out)
	require.NoError(t, os.Remove(filepath.Join(dir, "bins", "part.bin")))
	r = call(t, "get", model, ep)
	require.Equal(t, exit.NotFound, r.code)
	require.Contains(t, r.err, `"bins/part.bin"`)
	require.Empty(t, r.out)
}

// compiledModel writes a compiled model with a context binary, and with attributes that no schema
// knows.
func compiledModel(t *testing.T, dir string) string {
	m := tinymodel.Model{
		Nodes: []tinymodel.Node{{Op: "EPContext", Domain: "com.microsoft", Name: "part",
			Inputs: []string{"x"}, Outputs: []string{"y"},
			Attributes: map[string]any{"embed_mode": int64(0), "main_context": int64(1),
				"ep_cache_context": "bins/part.bin", "source": "TestEP",
				"notes": "made by hand", "max_size": int64(4096), "tuning": "fast",
				"table": strings.Repeat("long", 2048)}}},
		Inputs:  []tinymodel.Value{{Name: "x", Type: tinymodel.Float, Shape: []any{1}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: tinymodel.Float, Shape: []any{1}}},
	}
	path := filepath.Join(dir, "m_ctx.onnx")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "bins"), 0o700))
	require.NoError(t,
		os.WriteFile(filepath.Join(dir, "bins", "part.bin"), []byte("the context"), 0o600))
	require.NoError(t, os.WriteFile(path, m.Encode(), 0o600))
	return path
}

// A model that is compiled already is adopted where it is asked for, and reported as any build.
func TestGetAdopt(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	reply := func(reply *wire.AcquireReply) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
			// A copy, because the server completes the reply that it is given.
			return unixsock.Answer{Reply: proto.CloneOf(reply)}, nil
		}
	}
	model := compiledModel(t, t.TempDir())
	reply(&wire.AcquireReply{Outcome: "adopted", Ep: "TestEP", Build: strings.Repeat("cd", 32),
		Compatibility: "optimal"})
	r := call(t, "get", model, ep, "--adopt")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Regexp(t, `^adopted .*m_ctx.onnx: TestEP build cdcdcdcdcdcd, optimal, `, r.out)
	require.True(t, b.first().GetAdopt())
	require.Contains(t, call(t, "get", model, ep, "--adopt", "--json").out, `"outcome": "adopted"`)

	reply(&wire.AcquireReply{Outcome: "passthrough", Compatibility: "optimal",
		Why: "it would be adopted"})
	r = call(t, "get", model, ep, "--adopt", "-n")
	require.Equal(t, result{exit.Done, "would adopt " + model + "\n", ""}, r)
	reply(&wire.AcquireReply{Outcome: "passthrough", Compatibility: "optimal",
		Warnings: []string{"not adopted: it does not load: no"}})
	r = call(t, "get", model, ep, "--adopt")
	require.Equal(t, "passthrough "+model+": it is compiled already, optimal; load the file "+
		"itself\n",
		r.out)
	require.Equal(t, exit.Done, r.code)
	require.Contains(t, r.err, "not adopted: it does not load: no")
	require.Equal(t, exit.BadUsage, call(t, "get", model, ep, "--adopt", "--state", t.TempDir()).
		code)
	require.Equal(t, exit.BadUsage, call(t, "get", model, model, ep, "--adopt", "--share").code)
}

// A copy of a model that is compiled already is of its own files.
func TestGetOutOfACompiledModel(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "passthrough",
			Compatibility: "optimal"}}, nil
	}
	b.serve()
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "out")
	model := compiledModel(t, dir)
	r := call(t, "get", model, ep, "--out", out, "-n")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Regexp(t, `would write \S*part\.bin\nwould write \S*m_ctx\.onnx\n`, r.out,
		"the graph is last")
	require.NoDirExists(t, out)
	r = call(t, "get", model, ep, "--out", out)
	require.Equal(t, exit.Done, r.code, r.err)
	for _, name := range []string{"m_ctx.onnx", "bins/part.bin"} {
		require.Contains(t, r.out, "wrote "+filepath.Join(out, name)+"\n")
		want, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		got, err := os.ReadFile(filepath.Join(out, name))
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	require.Contains(t, call(t, "get", model, ep, "--out", dir).out,
		"exists already: "+model+"\n")
	require.NoError(t, os.Remove(filepath.Join(dir, "bins", "part.bin")))
	r = call(t, "get", model, ep, "--out", filepath.Join(t.TempDir(), "out"))
	require.Equal(t, exit.NotFound, r.code)
	require.Contains(t, r.err, `"bins/part.bin"`)
}

func TestGetExternalData(t *testing.T) {
	hub := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(hub, "snapshot", "sub"), 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(hub, "blobs"), 0o700))
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(hub, name), []byte(text), 0o600))
	}
	write("blobs/1111", "model")
	write("blobs/2222", "one")
	write("blobs/beside", "two")
	link := func(target, name string) {
		require.NoError(t, os.Symlink(target, filepath.Join(hub, "snapshot", name)))
	}
	link("../blobs/1111", "model.onnx")
	link("../../blobs/2222", "sub/one.bin")
	model := filepath.Join(hub, "snapshot", "model.onnx")

	t.Run("links as a model hub makes them", func(t *testing.T) {
		b := newStandIn(t)
		b.external = map[string]string{"sub/one.bin": "one"}
		b.serve()
		r := call(t, "get", model, ep)
		require.Equal(t, exit.Done, r.code, r.err)
	})
	t.Run("beside what the link points to", func(t *testing.T) {
		b := newStandIn(t)
		b.external = map[string]string{"beside": "two"}
		b.serve()
		r := call(t, "get", model, ep)
		require.Equal(t, exit.Done, r.code, r.err)
	})
	t.Run("in several spellings", func(t *testing.T) {
		b := newStandIn(t)
		b.external = map[string]string{"sub/one.bin": "one", "./sub//one.bin": "one",
			"sub/../sub/one.bin": "one"}
		b.serve()
		r := call(t, "get", model, ep)
		require.Equal(t, exit.Done, r.code, r.err)
	})
	t.Run("in a directory that a session option names", func(t *testing.T) {
		b := newStandIn(t)
		b.external = map[string]string{"one.bin": "one"} // which no link leads to from the model
		b.serve()
		require.Equal(t, exit.NotFound, call(t, "get", model, ep).code)
		dir := "--session-option=session.model_external_initializers_file_folder_path=" +
			filepath.Join(hub, "snapshot", "sub")
		r := call(t, "get", model, ep, dir)
		require.Equal(t, exit.Done, r.code, r.err)
		b.set(func() {
			require.Empty(t, b.asked[len(b.asked)-1].GetSessionOptions(),
				"no path goes to the daemon")
		})
	})
	refused := map[string]struct {
		location, says string
		code           int
	}{
		"up":        {"../blobs/2222", "outside the model's directory", exit.Failed},
		"absolute":  {"/etc/passwd", "outside the model's directory", exit.Failed},
		"missing":   {"none.bin", "no such file", exit.NotFound},
		"directory": {"sub", "a directory", exit.Failed},
		"FIFO":      {"fifo", "a FIFO", exit.Failed},
		"link out":  {"link", "escapes model directory", exit.Failed},
	}
	require.NoError(t, unix.Mkfifo(filepath.Join(hub, "snapshot", "fifo"), 0o600))
	write("private.key", "secret")
	link("../private.key", "link")
	for name, tc := range refused {
		t.Run(name, func(t *testing.T) {
			b := newStandIn(t)
			b.external = map[string]string{tc.location: ""}
			b.serve()
			r := call(t, "get", model, ep)
			require.Equal(t, tc.code, r.code, r.err)
			require.Contains(t, r.err, tc.says)
		})
	}
}

func TestGetModelThatIsNoFile(t *testing.T) {
	newStandIn(t).serve()
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	for path, says := range map[string]string{dir: "a directory", fifo: "a FIFO",
		"/dev/zero": "a device"} {
		r := call(t, "get", path, ep)
		require.Equal(t, exit.Failed, r.code)
		require.Contains(t, r.err, says)
		require.Equal(t, path == dir, strings.Contains(r.err, "epcachectl warm "), r.err)
	}
}

func TestGetProgram(t *testing.T) {
	newStandIn(t).serve()
	one, two := tinyModel(t, "one.onnx"), tinyModel(t, "two.onnx")
	program := func(args ...string) *exec.Cmd {
		cmd := exec.Command(os.Args[0], append([]string{"get", ep}, args...)...)
		cmd.Env = append(os.Environ(), asProgram+"=1")
		return cmd
	}
	t.Run("reads the graph and its sidecar through the descriptor", func(t *testing.T) {
		out, err := program(one, "--", "sh", "-c", `cat "$1" "$(dirname "$1")"/sub/weights.bin`,
			"sh", "{}").CombinedOutput()
		require.NoError(t, err, string(out))
		require.Equal(t, "graphweights", string(out))
	})
	t.Run("inside an argument", func(t *testing.T) {
		out, err := program(one, "--", "echo", "--model={}").Output()
		require.NoError(t, err)
		require.Regexp(t, `^--model=/proc/self/fd/\d+/f00d/0123456789abcdef_ctx.onnx\n$`,
			string(out))
	})
	t.Run("of two", func(t *testing.T) {
		out, err := program(one, two, "--", "sh", "-c", `cat "$1" "$2" "$3"; echo $#`, "sh", "{}",
			"{2}").Output()
		require.NoError(t, err)
		require.Equal(t, "graphgraphgraph3\n", string(out))
	})
	t.Run("gets what to load it with", func(t *testing.T) {
		out, err := program(one, two, "--", "sh", "-c", `printf %s "$EPCACHE_GET"`, "sh", "{}").
			Output()
		require.NoError(t, err)
		told := parseJSON(t, result{out: string(out)})
		require.Len(t, told, 2)
		require.Equal(t, "f00d/0123456789abcdef_ctx.onnx", jsonAt(t, told, 1, "graph"))
		require.NotEmpty(t, jsonAt(t, told, 0, "provider_options"))
	})
	t.Run("of more than a variable holds", func(t *testing.T) {
		args := append(slices.Repeat([]string{one}, 400), "--", "sh", "-c",
			`printf %s "${EPCACHE_GET-none}"; echo " $#"`, "sh", "{}")
		out, err := program(args...).Output()
		require.NoError(t, err)
		require.Equal(t, "none 400\n", string(out))
	})
	t.Run("its exit status", func(t *testing.T) {
		var exit *exec.ExitError
		require.ErrorAs(t, program(one, "--", "sh", "-c", "exit 9", "{}").Run(), &exit)
		require.Equal(t, 9, exit.ExitCode())
	})
	t.Run("its signals", func(t *testing.T) {
		cmd := program(one, "--", "sh", "-c", "kill -TERM $$; sleep 10", "{}")
		var exit *exec.ExitError
		require.ErrorAs(t, cmd.Run(), &exit)
		require.Equal(t, "signal: terminated", exit.String())
	})
	t.Run("with the source", func(t *testing.T) {
		out, err := program(one, "--or-plain", "--on-miss=fail", "--socket=/nowhere", "--wait=0",
			"--", "sh", "-c", `echo "$1 $EPCACHE_GET"`, "sh", "{}").CombinedOutput()
		require.NoError(t, err, string(out))
		require.Regexp(t, `warning: .*no daemon answers at .*; the program runs with the source `+
			`model\n(?s:.*)`+one+` \[\{.*"outcome":"failed"`, string(out))
		missing := filepath.Join(t.TempDir(), "missing.onnx")
		out, err = program(missing, "--or-plain", "--", "echo", "started {}").CombinedOutput()
		require.Error(t, err, "there is nothing to run the program with")
		require.NotContains(t, string(out), "started")
	})
	t.Run("not there", func(t *testing.T) {
		out, err := program(one, "--", "no-such-program", "{}").CombinedOutput()
		require.Error(t, err)
		require.Contains(t, string(out), `epcachectl: run "no-such-program"`)
	})
}

func TestGetOfAModelBeingCompiled(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{},
			&unixsock.Error{Class: wire.ErrorClass_NOT_FOUND,
				Text: `no build yet for model "m.onnx": it is being compiled (compiling, ` +
					`for 12s, of about 40s)`,
				Hint: "request it with on_miss wait",
				Facts: map[string]string{"phase": "compiling", "elapsed_ms": "12000",
					"estimate_ms": "40000", "job": strings.Repeat("1f", 16)}}
	}
	b.serve()
	model := tinyModel(t, "m.onnx")
	r := call(t, "get", ep, "--on-miss", "fail", model)
	require.Equal(t, exit.NotFound, r.code)
	require.Equal(t, `epcachectl: get "`+model+
		`": no build yet for model "m.onnx": it is being compiled (compiling, for 12s, of about 40s)
epcachectl: hint: wait for it: epcachectl get --ep StandInExecutionProvider `+model+
		`, or epcachectl jobs follow 1f1f1f1f1f1f
`, r.err)
	r = call(t, "get", ep, "-n", model)
	require.Equal(t, result{exit.Done, "would wait for " + model + ": it is being compiled\n", ""},
		r)
}

func TestARuntimeThatIsNotThere(t *testing.T) {
	newStandIn(t).serve()
	r := call(t, "get", tinyModel(t, "tiny.onnx"), ep, "--runtime", "/nonexistent")
	require.Equal(t, exit.NotFound, r.code, r.err)
	require.Contains(t, r.err, "--runtime /nonexistent: no such directory")
}
