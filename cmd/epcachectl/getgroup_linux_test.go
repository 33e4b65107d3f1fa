package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// newGroup is a daemon that has a group of the first two models that it is asked for.
func newGroup(t *testing.T) *standIn {
	b := newStandIn(t)
	const second = "0123456789abcdef_2_ctx.onnx"
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, b.id, second), []byte("second"), 0o400))
	digest, err := cas.Sum(t.Context(), strings.NewReader("second"), 0, 6)
	require.NoError(t, err)
	b.files = append(b.files,
		&wire.File{Name: b.id + "/" + second, Size: 6, Digest: digest.String()})
	b.acquire = func(a *wire.Acquire) (unixsock.Answer, error) {
		answer, err := b.hit()
		for i, name := range []string{"0123456789abcdef_ctx.onnx", second} {
			answer.Reply.Members = append(answer.Reply.Members,
				&wire.Member{Name: fmt.Sprintf("%d.onnx", i+1),
					ModelDigest:    strings.Repeat(fmt.Sprint(i+1), 64),
					Graph:          b.id + "/" + name,
					SessionOptions: map[string]string{"ep.share_ep_contexts": "1"}})
		}
		if len(a.Group) == 0 {
			answer.Reply.Member, answer.Reply.Graph = 1, answer.Reply.Members[1].Graph
		}
		return answer, err
	}
	return b
}

func TestWhyShareExplainsAGroup(t *testing.T) {
	b := newStandIn(t)
	groups := 0
	b.acquire = func(a *wire.Acquire) (unixsock.Answer, error) {
		groups = len(a.GetGroup())
		return explaining(explained("hit"))(a)
	}
	b.serve()
	prefill, decode := tinyModel(t, "prefill.onnx"), tinyModel(t, "decode.onnx")
	r := call(t, "why", "--share", prefill, decode, ep)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t, 1, groups)
	require.Equal(t, exit.BadUsage, call(t, "why", prefill, decode, ep).code)
	require.Equal(t, exit.BadUsage, call(t, "why", "--share", prefill, ep).code)
}

func TestGetShareRequestsOnceAndListsMembers(t *testing.T) {
	b := newGroup(t)
	b.serve()
	prefill, decode := tinyModel(t, "prefill.onnx"), tinyModel(t, "decode.onnx")
	r := call(t, "get", "--share", prefill, decode, ep)
	require.Equal(t, exit.Done, r.code, r.err)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	require.Len(t, lines, 4)
	require.Regexp(t, `^hit group of `+prefill+`, `+decode+
		`: StandInExecutionProvider build cdcdcdcdcdcd, optimal, 18 B in \S+ \(compiled in 2s\)$`,
		lines[0])
	require.Equal(t, "  1. "+prefill+"  f00d/0123456789abcdef_ctx.onnx", lines[1])
	require.Equal(t, "  2. "+decode+"  f00d/0123456789abcdef_2_ctx.onnx", lines[2])
	require.Equal(t, "  several in one process: in this order, with ep.share_ep_contexts=1, and "+
		"destroyed in reverse", lines[3])
	var asked []*wire.Acquire
	b.set(func() { asked = b.asked })
	require.Len(t, asked, 1)
	require.Equal(t, "prefill.onnx", asked[0].GetModel().GetName())
	require.Len(t, asked[0].GetGroup(), 1)
	require.Equal(t, "decode.onnx", asked[0].GetGroup()[0].GetName())
	require.NotEqual(t, asked[0].GetModel().GetFd(), asked[0].GetGroup()[0].GetFd())
}

func TestGetShareJSONHasAnElementForEachModel(t *testing.T) {
	newGroup(t).serve()
	r := call(t, "get", "--share", tinyModel(t, "a.onnx"), tinyModel(t, "b.onnx"), ep, "--json")
	require.Equal(t, exit.Done, r.code, r.err)
	list := parseJSON(t, r)
	require.Len(t, list, 2)
	for i, one := range list.([]any) {
		require.EqualValues(t, i, jsonAt(t, one, "member"))
		require.Len(t, jsonAt(t, one, "members"), 2)
		require.Equal(t, jsonAt(t, one, "members", i, "graph"), jsonAt(t, one, "graph"))
		require.Equal(t, jsonAt(t, one, "members", i, "model_digest"),
			jsonAt(t, one, "model_digest"))
		require.Equal(t, "1", jsonAt(t, one, "members", i, "session_options",
			"ep.share_ep_contexts"))
		require.NotContains(t, jsonAt(t, one, "session_options"), "ep.share_ep_contexts")
	}
}

func TestGetSaysThatAModelIsOneOfAGroup(t *testing.T) {
	newGroup(t).serve()
	r := call(t, "get", tinyModel(t, "b.onnx"), ep)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Contains(t, r.out, ", model 2 of a group of 2\n")
	require.Equal(t, 1, strings.Count(r.out, "\n"))
}

func TestGetShareGivesAProgramTheGraphsInOrder(t *testing.T) {
	newGroup(t).serve()
	out := filepath.Join(t.TempDir(), "out")
	r := call(t, "get", "--share", tinyModel(t, "a.onnx"), tinyModel(t, "b.onnx"), ep, "--out", out)
	require.Equal(t, exit.Done, r.code, r.err)
	for name, text := range map[string]string{"0123456789abcdef_ctx.onnx": "graph",
		"0123456789abcdef_2_ctx.onnx": "second", "sub/weights.bin": "weights"} {
		have, err := os.ReadFile(filepath.Join(out, name))
		require.NoError(t, err)
		require.Equal(t, text, string(have))
	}
	cmd := exec.Command(os.Args[0], "get", "--share", tinyModel(t, "a.onnx"),
		tinyModel(t, "b.onnx"), ep, "--", "cat", "{}")
	cmd.Env = append(os.Environ(), asProgram+"=1")
	text, err := cmd.Output()
	require.NoError(t, err)
	require.Equal(t, "graphsecond", string(text))
}

func TestGetShareFailsOnce(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{},
			&unixsock.Error{Class: wire.ErrorClass_NOT_FOUND, Text: "no build"}
	}
	b.serve()
	first, second := tinyModel(t, "a.onnx"), tinyModel(t, "b.onnx")
	r := call(t, "get", "--share", first, second, ep, "--on-miss=fail")
	require.Equal(t, exit.NotFound, r.code)
	require.Equal(t, 1, strings.Count(r.err, "no build"), r.err)
	require.Contains(t, r.err, "epcachectl get --ep StandInExecutionProvider --share "+first+" "+
		second)
	r = call(t, "get", "--share", first, second, ep, "-n")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t, "would compile group of "+first+", "+second+"\n", r.out)
	r = call(t, "get", "--share", first, filepath.Join(t.TempDir(), "none.onnx"), ep)
	require.Contains(t, r.err, "none.onnx")
	require.Equal(t, 1, strings.Count(r.err, "epcachectl: get"))
}

// Each model's own files are found beside it, also where two models call theirs the same.
func TestGetShareBringsTheFilesOfEachModel(t *testing.T) {
	b := newStandIn(t)
	asked := 0
	b.acquire = func(a *wire.Acquire) (unixsock.Answer, error) {
		if asked++; asked == 1 {
			return unixsock.Answer{},
				&unixsock.NeedError{Locations: []string{"w.bin", "w.bin"}, Members: []uint32{0, 1}}
		}
		answer, err := b.hit()
		for range 2 {
			answer.Reply.Members = append(answer.Reply.Members,
				&wire.Member{Graph: answer.Reply.Graph})
		}
		return answer, err
	}
	b.serve()
	first, second := tinyModel(t, "a.onnx"), tinyModel(t, "b.onnx")
	for _, path := range []string{first, second} {
		require.NoError(t,
			os.WriteFile(filepath.Join(filepath.Dir(path), "w.bin"), []byte("weights"), 0o600))
	}
	require.NotEqual(t, filepath.Dir(first), filepath.Dir(second))
	r := call(t, "get", "--share", first, second, ep)
	require.Equal(t, exit.Done, r.code, r.err)
	var last *wire.Acquire
	b.set(func() { last = b.asked[len(b.asked)-1] })
	require.Equal(t, "w.bin", last.GetModel().GetExternal()[0].GetLocation())
	require.Equal(t, "w.bin", last.GetGroup()[0].GetExternal()[0].GetLocation())
	require.NotEqual(t, last.GetModel().GetExternal()[0].GetFd(),
		last.GetGroup()[0].GetExternal()[0].GetFd())
}

func TestGroupsAreListedAndShown(t *testing.T) {
	b := newStandIn(t)
	b.builds = []*wire.Build{{Build: strings.Repeat("cd", 32), ModelName: "a.onnx",
		Members: []*wire.Member{
			{Name: "a.onnx", ModelDigest: "11", Graph: "x_ctx.onnx"},
			{Name: "b.onnx", ModelDigest: "22", Graph: "x_2_ctx.onnx"}}}}
	b.serve()
	r := call(t, "list")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Contains(t, r.out, "a.onnx +1")
	r = call(t, "show", "a.onnx")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Regexp(t, `model 2 +b.onnx  22  x_2_ctx.onnx`, r.out)
	r = call(t, "list", "--json")
	require.Contains(t, r.out, `"graph": "x_2_ctx.onnx"`)
	require.Contains(t, call(t, "rm", "b.onnx", "-n").out, "would delete a.onnx +1: ",
		"one that is not named goes with it")
}
