package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cmd/epcachectl/internal/doctor"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// doctored calls doctor, and gives what it found by subject and text.
func doctored(t *testing.T, args ...string) (doctor.Result, int) {
	t.Helper()
	r := call(t, append([]string{"doctor", "--json"}, args...)...)
	var out doctor.Result
	require.NoError(t, json.Unmarshal([]byte(r.out), &out), r.err)
	require.Empty(t, r.err, "what is found is the result")
	return out, r.code
}

// find returns the one finding of a severity with these words in its text.
func find(t *testing.T, r doctor.Result, severity, words string) doctor.Finding {
	t.Helper()
	for _, f := range r.Findings {
		if f.Severity == severity && strings.Contains(f.Text, words) {
			return f
		}
	}
	require.Fail(t, "not found", "%s %q in %+v", severity, words, r.Findings)
	return doctor.Finding{}
}

func TestDoctorAsksTheDaemon(t *testing.T) {
	b := newStandIn(t)
	b.advice = []*wire.Advice{{Severity: "ok", Subject: "disk", Text: "12 GiB free"}}
	b.serve()
	defer func(was string) { version = was }(version)
	version = "9" // the stand-in's
	r := call(t, "doctor")
	require.Equal(t, exit.Done, r.code, r.out)
	require.Contains(t, r.out, "ok       disk: 12 GiB free\n")
	require.True(t, strings.HasSuffix(r.out, "\nno problems found\n"), r.out)

	b.set(func() {
		b.advice = append(b.advice,
			&wire.Advice{Severity: "warning", Subject: "clock", Text: "it went back",
				Hint: "set it"},
			&wire.Advice{Severity: "problem", Subject: "rights",
				Text: "the library is not readable", Hint: "make it so"})
	})
	r = call(t, "doctor")
	require.Equal(t, exit.Failed, r.code)
	require.True(t, strings.HasPrefix(r.out, "problem  rights: the library is not readable\n     "+
		"    -> make it so\nwarning  clock: it went back\n         -> set it\nok "), r.out)
	require.True(t, strings.HasSuffix(r.out, "\n1 problem, 1 warning\n"), r.out)

	out, _ := doctored(t)
	require.Equal(t,
		doctor.Finding{Severity: "problem", Subject: "rights", Text: "the library is not readable",
			Hint: "make it so", Side: "daemon"}, find(t, out, "problem", "readable"))
	b.set(func() { b.advice = b.advice[:2] })
	_, code := doctored(t)
	require.Equal(t, exit.Done, code, "warnings are no failure")
}

func TestDoctorFindsAnOldDaemon(t *testing.T) {
	newStandIn(t).serve()
	out, code := doctored(t)
	require.Equal(t, exit.Done, code)
	require.Equal(t, "client",
		find(t, out, "warning", "it is epcached 9, and this is epcachectl "+version).Side)
}

func TestDoctorOfADaemonThatGivesNone(t *testing.T) {
	b := newStandIn(t)
	b.err = &unixsock.Error{Class: wire.ErrorClass_VERSION, Text: "no such request"}
	b.serve()
	out, _ := doctored(t)
	find(t, out, "warning", "it reports no findings: no such request")
}

// Without a daemon it says what can be seen.
func TestDoctorWithoutADaemon(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "none")
	t.Setenv(unixsock.SocketVariable, path)
	out, code := doctored(t, "--wait=0", "--runtime", dir)
	require.Equal(t, exit.NoDaemon, code)
	require.False(t, out.Daemon)
	require.Equal(t, "client",
		find(t, out, "problem", "no daemon answers at "+path+
			": there is no such socket; EPCACHE_SOCKET names it").Side)
	require.Equal(t, "application", find(t, out, "problem", "libonnxruntime.so").Side)

	require.NoError(t, os.WriteFile(path, nil, 0o600))
	out, _ = doctored(t, "--wait=0")
	find(t, out, "problem", path+" is not a socket but a file")
}

// The next daemon that a client starts reads it, whichever daemon answers now, or none.
func TestDoctorLooksAtTheUsersOwnConfiguration(t *testing.T) {
	emptyHome(t, "")
	config := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", config)
	file := filepath.Join(config, "epcached", "epcached.toml")
	require.NoError(t, os.Mkdir(filepath.Dir(file), 0o700))
	_, code := doctored(t)
	require.Equal(t, exit.Done, code, "a daemon is started when one is needed")

	require.NoError(t, os.WriteFile(file, []byte("nonsense = 1\n"), 0o600))
	out, code := doctored(t)
	require.Equal(t, exit.NoDaemon, code)
	find(t, out, "problem", file+":1:1: unknown field")
	require.NoError(t, os.WriteFile(file, []byte("nonsense = 1\nmore = 2\n"), 0o600))
	out, _ = doctored(t)
	find(t, out, "problem", file+`:1:1: unknown field "nonsense", and 1 more`)
	newStandIn(t).serve()
	out, code = doctored(t)
	require.Equal(t, exit.Failed, code)
	find(t, out, "problem", file+":1:1: unknown field")
	require.NoError(t, os.WriteFile(file, []byte("rules = [\"none.toml\"]\n"), 0o600))
	out, _ = doctored(t)
	find(t, out, "problem", "none.toml")
}

// A user's daemon leads to its socket from a second place.
func TestDoctorCountsOneSocketOnce(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	path := os.Getenv(unixsock.SocketVariable)
	require.NotEmpty(t, path)
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_STATE_HOME", "")
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv(unixsock.SocketVariable, "")
	all := unixsock.UserSockets()
	require.Len(t, all, 2)
	for _, other := range all {
		require.NoError(t, os.MkdirAll(filepath.Dir(other), 0o700))
		require.NoError(t, os.Symlink(path, other))
	}
	out, _ := doctored(t)
	for _, f := range out.Findings {
		require.NotContains(t, f.Text, "two daemons run")
	}
	require.NoError(t, os.Remove(all[1]))
	l, err := net.Listen("unix", all[1])
	require.NoError(t, err)
	defer l.Close()
	out, _ = doctored(t)
	find(t, out, "warning", "two daemons run")
}

// fakeRuntime is a directory as pip leaves it; nothing of it can be loaded.
func fakeRuntime(t *testing.T, ort, openvino string) string {
	t.Helper()
	dir := t.TempDir()
	for _, file := range []string{"onnxruntime/capi/libonnxruntime.so." + ort,
		"onnxruntime_ep_openvino/libonnxruntime_providers_openvino_plugin.so",
		"onnxruntime_ep_openvino-" + openvino + ".dist-info/METADATA"} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, file)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), nil, 0o600))
	}
	return dir
}

func TestDoctorOfARuntime(t *testing.T) {
	b := newStandIn(t)
	path := b.serve()
	out, code := doctored(t, "--runtime", fakeRuntime(t, "1.31.1", "1.8.0"))
	require.Equal(t, exit.Failed, code)
	require.Contains(t,
		find(t, out, "problem",
			"OpenVINOExecutionProvider 1.8.0 does not start with ONNX Runtime 1.31.1").Hint,
		"1.8.1")

	dir := fakeRuntime(t, "1.31.1", "1.8.1")
	out, code = doctored(t, "--runtime", dir)
	require.Equal(t, exit.Done, code)
	find(t, out, "ok", "OpenVINOExecutionProvider 1.8.1 with ONNX Runtime 1.31.1")
	find(t, out, "ok", "uses it when a request names it")

	client, err := unixsock.Dial(t.Context(), path)
	require.NoError(t, err)
	defer client.Close()
	r, err := compilers.Find(dir)
	require.NoError(t, err)
	others := &doctor.Examination{Client: client} // a daemon that runs as another user
	others.CheckKnown(t.Context(), "runtime", r)
	require.Contains(t, find(t, doctor.Result{Findings: others.List}, "ok",
		"has no equal OpenVINOExecutionProvider").Text, fmt.Sprintf("directory = %q", dir))
	digest, err := runtimes.LibraryDigest(t.Context(), r.EPs[0])
	require.NoError(t, err)
	equal := &wire.EpFacts{Name: "OpenVINOExecutionProvider", Library: "/opt/another/place.so",
		LibraryDigest: digest.String()}
	b.set(func() {
		b.runtimes = []*wire.RuntimeFacts{{Directory: "/opt/another",
			Eps: []*wire.EpFacts{equal}}}
	})
	others = &doctor.Examination{Client: client}
	others.CheckKnown(t.Context(), "runtime", r)
	find(t, doctor.Result{Findings: others.List}, "ok",
		"the daemon has its OpenVINOExecutionProvider")
	b.set(func() { b.runtimes = nil })

	library := filepath.Join(dir, "onnxruntime_ep_openvino",
		"libonnxruntime_providers_openvino_plugin.so")
	has := func(failure string) {
		b.set(func() {
			b.runtimes = []*wire.RuntimeFacts{{Directory: dir, Error: failure,
				Eps: []*wire.EpFacts{{Name: "OpenVINOExecutionProvider", Library: library}}}}
		})
	}
	has("")
	out, code = doctored(t, "--runtime", dir)
	require.Equal(t, exit.Done, code)
	find(t, out, "ok", "the daemon has its OpenVINOExecutionProvider")
	has("it crashed")
	out, _ = doctored(t, "--runtime", dir)
	find(t, out, "problem",
		"the daemon has its OpenVINOExecutionProvider, and cannot use it: it crashed")
}

// fakePython is a program that runs the script in place of the doctor of epcache.
func fakePython(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "python")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
	return path
}

func TestDoctorOfAPython(t *testing.T) {
	newStandIn(t).serve()
	says := func(severity string) string {
		return `echo '{"findings":[{"severity":"` + severity + `","subject":"onnxruntime",` +
			`"text":"'"$*"'","hint":"","side":"application"}]}'`
	}
	const arguments = "-m epcache doctor --application --json"
	cases := map[string]struct{ script, severity, text string }{
		"no problems":   {says("ok"), "ok", arguments},
		"a warning":     {says("warning"), "warning", arguments},
		"a problem":     {says("problem") + "; exit 1", "problem", arguments},
		"crashes":       {"echo last words >&2; kill -SEGV $$", "problem", "segmentation fault"},
		"last words":    {"echo last words >&2; kill -SEGV $$", "problem", "last words"},
		"says nothing":  {"true", "problem", "it printed no findings"},
		"without JSON":  {"echo no JSON; exit 3", "problem", "exit status 3"},
		"its own words": {"echo No module named epcache >&2; exit 1", "problem", "No module"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			out, code := doctored(t, "--python", fakePython(t, c.script))
			require.Equal(t, "application", find(t, out, c.severity, c.text).Side)
			require.Equal(t,
				map[bool]int{true: exit.Failed, false: exit.Done}[c.severity == "problem"], code)
		})
	}
	t.Run("no such program", func(t *testing.T) {
		out, code := doctored(t, "--python", filepath.Join(t.TempDir(), "none"))
		require.Equal(t, exit.Failed, code)
		find(t, out, "problem", "it cannot be run: ")
	})
}

// The doctor of the package epcache examines the Python, also one that has no epcache of its own:
// PYTHONPATH adds that of this checkout, as PythonPackages does for an installed program.
func TestDoctorOfARealPython(t *testing.T) {
	python, runtimes := os.Getenv("EPCACHED_PYTHON"), os.Getenv("EPCACHED_RUNTIMES")
	if python == "" || runtimes == "" {
		t.Skip("SKIPPED: EPCACHED_PYTHON and EPCACHED_RUNTIMES are not set; make test sets them")
	}
	newStandIn(t).serve()
	epcache, err := filepath.Abs("../../clients/python")
	require.NoError(t, err)
	with := func(dir string) { t.Setenv("PYTHONPATH", epcache+":"+dir) }
	t.Run("fits", func(t *testing.T) {
		with(filepath.Join(runtimes, "openvino-1.8.1"))
		out, _ := doctored(t, "--python", python)
		find(t, out, "ok", "1.31.1 in ")
		// the stand-in explains nothing
		find(t, out, "problem", "on CPU; the daemon does not serve it")
	})
	t.Run("does not fit", func(t *testing.T) {
		dir := t.TempDir()
		for name, from := range map[string]string{"onnxruntime": "openvino-1.8.1",
			"onnxruntime_ep_openvino":                 "openvino-1.8.0-ort-1.28.0",
			"onnxruntime_ep_openvino-1.8.0.dist-info": "openvino-1.8.0-ort-1.28.0"} {
			require.NoError(t,
				os.Symlink(filepath.Join(runtimes, from, name), filepath.Join(dir, name)))
		}
		with(dir)
		out, code := doctored(t, "--python", python)
		require.Equal(t, exit.Failed, code)
		find(t, out, "problem", "is not available in this build")
	})
}
