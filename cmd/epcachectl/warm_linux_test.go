package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestGetInTheBackground(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "j1", State: "running", ModelName: "tiny.onnx"}}
	b.queue()
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	require.Equal(t, result{exitDone, "queued " + model + ": job j1\n", ""}, call(t, "get", model, ep, "--on-miss", "background", "--keep-going"))
	require.Equal(t, wire.OnMiss_BACKGROUND, b.first().GetOnMiss())
	require.True(t, b.first().GetKeepGoing())
	var list []getResult
	require.NoError(t, json.Unmarshal([]byte(call(t, "get", model, ep, "--on-miss", "background", "--json").out), &list))
	require.Equal(t, "queued", list[0].Outcome)
	require.Equal(t, "j1", list[0].Job)

	out := filepath.Join(t.TempDir(), "out")
	for _, more := range [][]string{{"--out", out}, {"--", "cat", "{}"}} {
		r := call(t, append([]string{"get", model, ep, "--on-miss", "background"}, more...)...)
		require.Equal(t, exitNotFound, r.code, "nothing is there to copy or to run with")
		require.Contains(t, r.err, "it is being compiled")
		require.Contains(t, r.err, "hint: wait for it: epcachectl jobs follow j1\n")
		require.NoDirExists(t, out)
	}
	b.set(func() { b.jobs = nil })
	require.Contains(t, call(t, "get", model, ep, "--on-miss", "background").out, "hit ", "what is there is there at once")
}

func TestWarm(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "j1", State: "queued", ModelName: "one.onnx"}}
	b.queue()
	b.serve()
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "sub", ".store"), 0o700))
	for _, name := range []string{"one.onnx", "sub/two.onnx", "sub/two_ctx.onnx", "sub/.store/three.onnx", "notes.txt"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("model"), 0o600))
	}
	r := call(t, "warm", dir, ep)
	require.Equal(t, exitDone, r.code, r.err)
	require.Regexp(t, `^queued `+dir+`/one.onnx: job j1\nhit `+dir+`/sub/two.onnx: .*\n$`, r.out, "what was compiled is no model, and what is hidden is not for this")
	require.Empty(t, r.err)
	require.NotContains(t, b.changed(), "follow j1")

	r = call(t, "warm", filepath.Join(dir, "sub"), ep, "-n")
	require.Contains(t, r.out, "would hit")
	empty := t.TempDir()
	require.Equal(t, result{exitNotFound, "", fmt.Sprintf("epcachectl: warm %q: no model is in it: no *.onnx file that is not *_ctx.onnx\n", empty) +
		"epcachectl: hint: name the models themselves if they are called otherwise\n"}, call(t, "warm", empty, ep))
	for _, verb := range []string{"warm", "key", "why", "get"} {
		require.Contains(t, call(t, verb, "nosuch.onnx", ep).err, verb+` "nosuch.onnx": no such file or directory`)
	}
	require.Equal(t, exitUsage, call(t, "warm", ep).code)
	b.set(func() { b.runtimes = twoEPs() })
	require.Equal(t, exitUsage, call(t, "warm", dir).code, "which execution provider?")
}

func TestWarmFollow(t *testing.T) {
	cases := map[string]struct {
		job  *wire.Job
		code int
		says string
	}{
		"done":   {&wire.Job{State: "done", Build: "0123456789abcdef", Ep: "A", ElapsedMs: 2500}, exitDone, "compiled MODEL: A build 0123456789ab in 2.5s\n"},
		"failed": {&wire.Job{State: "failed", Error: &wire.Error{Class: wire.ErrorClass_COMPILE_FAILED, Text: "no luck"}}, exitFailed, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newStandIn(t)
			tc.job.Id = "j1"
			b.jobs = []*wire.Job{tc.job}
			b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
				return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "background", Job: "j1"}}, nil
			}
			b.serve()
			model := tinyModel(t, "tiny.onnx")
			r := call(t, "warm", model, ep, "--follow")
			require.Equal(t, tc.code, r.code, r.err)
			require.Contains(t, r.err, "epcachectl: compiling "+model+", about 3s in all\n")
			if tc.says == "" {
				require.Contains(t, r.err, "no luck")
				require.Empty(t, r.out)
				return
			}
			require.Equal(t, "compiled "+model+tc.says[len("compiled MODEL"):], r.out)
		})
	}
}

// The daemon takes only so many compiles that nobody waits for: the others are asked for as soon as there is room.
func TestWarmWaitsForRoom(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "one.onnx", State: "done"}, {Id: "two.onnx", State: "done"}, {Id: "three.onnx", State: "done"}}
	taken := 0
	b.acquire = func(a *wire.Acquire) (unixsock.Answer, error) {
		if taken > len(b.changes) { // one at a time, and one more for each that was waited for
			return unixsock.Answer{}, &unixsock.Error{Class: wire.ErrorClass_BUSY, Text: "too many compiles in the background"}
		}
		taken++
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "background", Job: a.GetModel().GetName()}}, nil
	}
	b.serve()
	r := call(t, "warm", tinyModel(t, "one.onnx"), tinyModel(t, "two.onnx"), tinyModel(t, "three.onnx"), ep)
	require.Equal(t, exitDone, r.code, r.err)
	for _, name := range []string{"one", "two", "three"} {
		require.Regexp(t, "queued .*/"+name+".onnx: job "+name, r.out)
	}
	require.Len(t, b.changed(), 2, "no more was waited for than had to be")

	b.set(func() { taken = 100 })
	r = call(t, "warm", tinyModel(t, "one.onnx"), ep)
	require.Equal(t, exitFailed, r.code, "others take the room")
	require.Contains(t, r.err, "too many compiles")
}

// A job that ended before it was followed, or with a daemon, is asked for again; a daemon that never knows it is not asked for ever.
func TestWarmFollowsAJobThatIsGone(t *testing.T) {
	b := newStandIn(t)
	asked := 0
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		if asked++; asked > 1 {
			return b.hit()
		}
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "background", Job: "gone"}}, nil
	}
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "warm", model, ep, "--follow")
	require.Equal(t, exitDone, r.code, r.err)
	require.Contains(t, r.out, "hit "+model)

	b.set(func() { asked = -10 })
	r = call(t, "warm", model, ep, "--follow")
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.err, "its job is gone as often as it is asked for")
}
