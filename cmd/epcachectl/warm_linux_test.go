package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestGetInTheBackground(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "j1", State: "running", ModelName: "tiny.onnx"}}
	b.queue()
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	require.Equal(t, result{exit.Done, "queued " + model + ": job j1\n", ""},
		call(t, "get", model, ep, "--on-miss", "background", "--keep-going"))
	require.Equal(t, wire.OnMiss_BACKGROUND, b.first().GetOnMiss())
	require.True(t, b.first().GetKeepGoing())
	list := parseJSON(t, call(t, "get", model, ep, "--on-miss", "background", "--json"))
	require.Equal(t, "queued", jsonAt(t, list, 0, "outcome"))
	require.Equal(t, "j1", jsonAt(t, list, 0, "job"))

	out := filepath.Join(t.TempDir(), "out")
	for _, more := range [][]string{{"--out", out}, {"--", "cat", "{}"}} {
		r := call(t, append([]string{"get", model, ep, "--on-miss", "background"}, more...)...)
		require.Equal(t, exit.NotFound, r.code, "nothing is there to copy or to run with")
		require.Contains(t, r.err, "it is being compiled")
		require.Contains(t, r.err, "hint: wait for it: epcachectl jobs follow j1\n")
		require.NoDirExists(t, out)
	}
	b.set(func() { b.jobs = nil })
	require.Contains(t, call(t, "get", model, ep, "--on-miss", "background").out, "hit ",
		"what is there is there at once")
}

func TestWarm(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "j1", State: "queued", ModelName: "one.onnx"}}
	b.queue()
	b.serve()
	dir := t.TempDir()
	for _, name := range []string{"sub/.store", "state/manifests", "state/objects",
		"state/staging"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, name), 0o700))
	}
	for _, name := range []string{"one.onnx", "sub/two.onnx", "sub/two_ctx.onnx",
		"sub/.store/three.onnx", "notes.txt",
		"state/CACHEDIR.TAG", "state/staging/one.onnx"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("model"), 0o600))
	}
	r := call(t, "warm", dir, ep)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Regexp(t, `^queued `+dir+`/one.onnx: job j1\nhit `+dir+`/sub/two.onnx: .*\n$`, r.out,
		"what was compiled is no model, and what is hidden is not for this")
	require.Empty(t, r.err)
	require.NotContains(t, b.changed(), "follow j1")

	r = call(t, "warm", filepath.Join(dir, "sub"), ep, "-n")
	require.Contains(t, r.out, "would hit")
	empty := t.TempDir()
	require.Equal(t,
		result{exit.NotFound, "",
			fmt.Sprintf(
				"epcachectl: warm %q: no model in it: no *.onnx file other than *_ctx.onnx\n",
				empty) +
				"epcachectl: hint: if the models have other names, name them one by one\n"},
		call(t, "warm", empty, ep))
	for _, verb := range []string{"warm", "why", "get"} {
		require.Contains(t, call(t, verb, "nosuch.onnx", ep).err,
			verb+` "nosuch.onnx": no such file or directory`)
	}
	require.Equal(t, exit.BadUsage, call(t, "warm", ep).code)
	b.set(func() { b.runtimes = twoEPs() })
	require.Equal(t, exit.BadUsage, call(t, "warm", dir).code, "which execution provider?")
}

// pipeline writes a pipeline file beside models that it may list.
func pipeline(t *testing.T, text string) (file string) {
	dir := t.TempDir()
	for _, name := range []string{"det.onnx", "rec.onnx", "prefill.onnx", "decode.onnx"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("model"), 0o600))
	}
	file = filepath.Join(dir, "pipeline.toml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func TestWarmPipeline(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	file := pipeline(t, `
ep = ["A:CPU"]
options = { mode = "fast" }
[[model]]
path = "det.onnx"
dims = { height = 640 }
options = { mode = "exact" }
[[group]]
models = ["prefill.onnx", "decode.onnx"]
ep = ["B", "C"]
options = { "C/threads" = 2 }
session_options = { "session.x64quantprecision" = 1 }
`)
	b.set(func() {
		b.acquire = func(a *wire.Acquire) (unixsock.Answer, error) {
			answer, err := b.hit()
			answer.Reply.Members = nil
			for range a.GetGroup() {
				answer.Reply.Members = []*wire.Member{{Graph: "a"}, {Graph: "b"}}
			}
			return answer, err
		}
	})
	r := call(t, "warm", filepath.Dir(file), "--pipeline", file, "--ep", "D", "--dim", "batch=4",
		"--dim", "height=1", "--json")
	require.Equal(t, exit.Done, r.code, r.err)
	asked := map[string]*wire.Acquire{}
	b.set(func() {
		for _, a := range b.asked {
			asked[a.GetModel().GetName()] = a
		}
	})
	require.Len(t, asked, 3, "a model that the file lists is asked for as the file says, and once")
	det, rec, group := asked["det.onnx"], asked["rec.onnx"], asked["prefill.onnx"]
	require.Equal(t, map[string]int64{"batch": 4, "height": 640}, det.GetFreeDimensions(),
		"the file goes before the flags")
	require.Equal(t, "A", det.GetEps()[0].GetName())
	require.Equal(t, "CPU", det.GetEps()[0].GetDevices()[0].GetType())
	require.Equal(t, map[string]string{"mode": "exact"}, det.GetEps()[0].GetOptions())
	require.Equal(t, "D", rec.GetEps()[0].GetName(), "the file does not list it")
	require.Equal(t, map[string]int64{"batch": 4, "height": 1}, rec.GetFreeDimensions())
	require.Equal(t, "decode.onnx", group.GetGroup()[0].GetName())
	require.Equal(t, []string{"B", "C"},
		[]string{group.GetEps()[0].GetName(), group.GetEps()[1].GetName()})
	require.Empty(t, group.GetEps()[0].GetOptions(),
		"options at the top are for the providers there")
	require.Equal(t, map[string]string{"threads": "2"}, group.GetEps()[1].GetOptions())
	require.Equal(t, map[string]string{"session.x64quantprecision": "1"}, group.GetSessionOptions())
	require.Equal(t, wire.OnMiss_BACKGROUND, group.GetOnMiss())

	b.set(func() { b.asked = nil })
	require.Equal(t, exit.Done,
		call(t, "warm", "--pipeline", pipeline(t, "[[model]]\npath = \"det.onnx\"\n")).code)
	require.Equal(t, "StandInExecutionProvider", b.first().GetEps()[0].GetName(),
		"the only one that there is")

	b.set(func() { b.runtimes = twoEPs() })
	r = call(t, "warm", filepath.Dir(file), "--pipeline", file)
	require.Equal(t, exit.BadUsage, r.code)
	unlisted := filepath.Join(filepath.Dir(file), "rec.onnx")
	require.Contains(t, r.err, fmt.Sprintf("warm %q: no --ep", unlisted),
		"the file does not list it")
}

func TestWarmPipelineGroupIsFollowedAsOne(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "j1", State: "done", Build: "0123456789abcdef", Ep: "A",
		ElapsedMs: 2500}}
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "background", Job: "j1"}}, nil
	}
	b.serve()
	file := pipeline(t, "[[group]]\nmodels = [\"prefill.onnx\", \"decode.onnx\"]\n")
	r := call(t, "warm", "--pipeline", file, "--follow", ep)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Contains(t, r.out, "group of "+filepath.Dir(file)+"/prefill.onnx, "+filepath.Dir(file)+
		"/decode.onnx")
	require.Equal(t, 1, strings.Count(r.out, "compiled"), r.out)
}

func TestWarmFollowReportsTheJobInBothForms(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "j1", State: "done", Build: "0123456789abcdef", Ep: "A",
		ElapsedMs: 2500}}
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "background", Job: "j1"}}, nil
	}
	b.serve()
	model := tinyModel(t, "m.onnx")
	r := call(t, "warm", model, "--follow", ep)
	require.Equal(t, "compiled "+model+": A build 0123456789ab in 2.5s\n", r.out)
	list := parseJSON(t, call(t, "warm", model, "--follow", "--json", ep))
	require.Equal(t, "A", jsonAt(t, list, 0, "ep"))
	require.InDelta(t, 2.5, jsonAt(t, list, 0, "elapsed_seconds"), 1e-9)
}

func TestWarmPipelineMistakes(t *testing.T) {
	for name, c := range map[string]struct{ text, says string }{
		"field": {"[[model]]\npath = \"det.onnx\"\nopts = {}\n",
			`:3:1: unknown field "model[1].opts"`},
		"ep": {"[[model]]\npath = \"det.onnx\"\nep = [\"A\", \":CPU\"]\n",
			`:3:12: field "model[1].ep[2]": ":CPU" is not EP`},
		"whose": {"ep = [\"A\", \"B\"]\noptions = { x = 1 }\n[[model]]\npath = \"det.onnx\"\n",
			`:2:13: field "options.x": there are 2 execution providers: write "A/x"`},
		"no such": {"ep = [\"A\"]\n[[model]]\npath = \"det.onnx\"\noptions = { \"B/x\" = 1 }\n",
			`:4:13: field "model[1].options.B/x": unknown execution provider "B"`},
		"two fault": {"[[model]]\npath = 1\n[[group]]\nmodels = []\n",
			`:4:1: field "group[1].models"`},
	} {
		t.Run(name, func(t *testing.T) {
			file := pipeline(t, c.text)
			r := call(t, "warm", "--pipeline", file, "--socket", "/nowhere/s")
			require.Equal(t, exit.BadUsage, r.code, r.err)
			require.Contains(t, r.err, file+c.says)
		})
	}
	file := pipeline(t, "ep = [\"A\"]\n[[model]]\npath = \"det.onnx\"\n")
	r := call(t, "warm", "--pipeline", file, "--option", "x=1")
	require.Equal(t, exit.BadUsage, r.code)
	require.Contains(t, r.err, "there is no --ep")
	require.Contains(t, call(t, "warm", "--pipeline", file+".none").err, "no such file")
	require.Equal(t, exit.BadUsage, call(t, "warm").code)
}

func TestWarmFollow(t *testing.T) {
	cases := map[string]struct {
		job  *wire.Job
		code int
		says string
	}{
		"done": {&wire.Job{State: "done", Build: "0123456789abcdef", Ep: "A", ElapsedMs: 2500},
			exit.Done, "compiled MODEL: A build 0123456789ab in 2.5s\n"},
		"failed": {&wire.Job{State: "failed",
			Error: &wire.Error{Class: wire.ErrorClass_COMPILE_FAILED, Text: "no luck"}},
			exit.Failed, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newStandIn(t)
			tc.job.Id = "j1"
			b.jobs = []*wire.Job{tc.job}
			b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
				return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "background", Job: "j1"}},
					nil
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

// The daemon bounds background jobs: warm requests the others when jobs have ended.
func TestWarmWaitsForRoom(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "one.onnx", State: "done"}, {Id: "two.onnx", State: "done"},
		{Id: "three.onnx", State: "done"}}
	taken := 0
	b.acquire = func(a *wire.Acquire) (unixsock.Answer, error) {
		if taken > len(b.changes) { // one at a time, and one more for each that was waited for
			return unixsock.Answer{},
				&unixsock.Error{Class: wire.ErrorClass_BUSY,
					Text: "too many compiles in the background"}
		}
		taken++
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "background",
			Job: a.GetModel().GetName()}}, nil
	}
	b.serve()
	r := call(t, "warm", tinyModel(t, "one.onnx"), tinyModel(t, "two.onnx"),
		tinyModel(t, "three.onnx"), ep)
	require.Equal(t, exit.Done, r.code, r.err)
	for _, name := range []string{"one", "two", "three"} {
		require.Regexp(t, "queued .*/"+name+".onnx: job "+name, r.out)
	}
	require.Len(t, b.changed(), 2, "no more was waited for than had to be")

	b.set(func() { taken = 100 })
	r = call(t, "warm", tinyModel(t, "one.onnx"), ep)
	require.Equal(t, exit.Failed, r.code, "others take the room")
	require.Contains(t, r.err, "too many compiles")
}

// A job that ended before it was followed, or with a daemon, is asked for again; a daemon that
// never knows it is not asked for ever.
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
	require.Equal(t, exit.Done, r.code, r.err)
	require.Contains(t, r.out, "hit "+model)

	b.set(func() { asked = -10 })
	r = call(t, "warm", model, ep, "--follow")
	require.Equal(t, exit.Failed, r.code)
	require.Contains(t, r.err, "its job ended several times without a result")
}
