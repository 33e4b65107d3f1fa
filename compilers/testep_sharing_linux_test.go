//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

var (
	share = set{"ep.share_ep_contexts": "1"}
	last  = set{"ep.share_ep_contexts": "1", "ep.stop_share_ep_contexts": "1"}
)

// member returns the i-th model of a group: the same weights, and one layer more than the one
// before.
func member(seed uint64, i int) tinymodel.Model { return layers(seed, i+1, false) }

// compileGroup compiles models of a group into a directory, and gives their compiled forms.
func compileGroup(t *testing.T, h host, dir string, seed uint64, count int) []string {
	var compiled []string
	for i := range count {
		entries := share
		if i == count-1 {
			entries = last
		}
		name := "model" + itoa(i+1)
		h.compile(t, write(t, dir, name+".onnx", member(seed, i)), entries, nil)
		compiled = append(compiled, filepath.Join(dir, name+"_ctx.onnx"))
	}
	return compiled
}

// weightSharing has the guidelines for models that share one context.
var weightSharing = []guideline{
	{"identical weights of the graphs stand in the binary once", func(t *testing.T, h host) {
		dir := t.TempDir()
		compileGroup(t, h, dir, 1, 3)
		all, err := os.ReadFile(filepath.Join(dir, "model1_epcachedtest.bin"))
		require.NoError(t, err)
		for _, w := range member(1, 2).Initializers {
			require.Equal(t, 1, bytes.Count(all, w.Raw), w.Name)
		}
	}},
	{"the first session decides the binary's name, the last one writes it, each creates a model: " +
		"N+1 files", func(t *testing.T, h host) {
		dir := t.TempDir()
		h.compile(t, write(t, dir, "model1.onnx", member(1, 0)), share, nil)
		require.Equal(t, []string{"model1.onnx", "model1_ctx.onnx"}, listing(t, dir))
		h.compile(t, write(t, dir, "model2.onnx", member(1, 1)), last, nil)
		require.Equal(t,
			[]string{"model1.onnx", "model1_ctx.onnx", "model1_epcachedtest.bin", "model2.onnx",
				"model2_ctx.onnx"}, listing(t, dir))
		for _, name := range []string{"model1_ctx.onnx", "model2_ctx.onnx"} {
			require.Equal(t, "model1_epcachedtest.bin",
				readModel(t, filepath.Join(dir, name)).Contexts[0].CacheContext)
		}
	}},
	{"a last session that fails clears it too", func(t *testing.T, h host) {
		dir := t.TempDir()
		h.compile(t, write(t, dir, "model1.onnx", member(1, 0)), share, nil)
		entries := set{"ep.context_enable": "1", "ep.share_ep_contexts": "1",
			"ep.stop_share_ep_contexts": "1"}
		h.refuses(t, epFail, write(t, dir, "model2.onnx", member(1, 1)), entries,
			set{"fault": "fail@compile"})
		other := t.TempDir()
		h.compile(t, write(t, other, "fresh.onnx", member(1, 0)), last, nil)
		require.FileExists(t, filepath.Join(other, "fresh_epcachedtest.bin"))
	}},
	{"models that share are not embedded", func(t *testing.T, h host) {
		entries := set{"ep.context_enable": "1", "ep.context_embed_mode": "1",
			"ep.share_ep_contexts": "1", "ep.stop_share_ep_contexts": "1"}
		text := h.refuses(t, invalidArgument, write(t, t.TempDir(), "m.onnx", member(1, 0)),
			entries, nil)
		require.Contains(t, text, "ep.context_embed_mode")
	}},
	{"a group loads in order in one process, computes right, and is destroyed in reverse",
		func(t *testing.T, h host) {
			compiled := compileGroup(t, h, t.TempDir(), 1, 3)
			var sessions []*ort.Session
			for _, path := range compiled {
				sessions = append(sessions, h.open(t, path, share, nil))
			}
			for i, s := range sessions {
				requireComputes(t, s, member(1, i))
			}
			for i := len(sessions) - 1; i >= 0; i-- {
				sessions[i].Release()
				for k, s := range sessions[:i] {
					requireComputes(t, s, member(1, k))
				}
			}
		}},
	{"the second session skips loading: its graph is in the workspace", func(t *testing.T, h host) {
		dir := t.TempDir()
		compiled := compileGroup(t, h, dir, 1, 2)
		first := h.open(t, compiled[0], share, nil)
		defer first.Release()
		spoil(t, filepath.Join(dir, "model1_epcachedtest.bin"))
		second := h.open(t, compiled[1], share, nil)
		defer second.Release()
		requireComputes(t, second, member(1, 1))
		require.Contains(t, h.refuses(t, invalidGraph, compiled[1], nil, nil), "checksum",
			"without sharing it reads the file")
	}},
	{"a graph that was taken is no longer in the workspace", func(t *testing.T, h host) {
		dir := t.TempDir()
		compiled := compileGroup(t, h, dir, 1, 2)
		first, second := h.open(t, compiled[0], share, nil), h.open(t, compiled[1], share, nil)
		defer first.Release()
		third := h.open(t, compiled[1], share, nil) // from the file
		requireComputes(t, third, member(1, 1))
		third.Release()
		requireComputes(t, second, member(1, 1))
		second.Release()
		spoil(t, filepath.Join(dir, "model1_epcachedtest.bin"))
		require.Contains(t, h.refuses(t, invalidGraph, compiled[1], share, nil), "checksum")
	}},
	{"two groups of equal names and shapes keep apart, also at one path after the other",
		func(t *testing.T, h host) {
			parent := t.TempDir()
			// both are compiled here, so that their graphs have equal names
			at := filepath.Join(parent, "at")
			for i, name := range []string{"a", "b"} {
				compileGroup(t, h, at, uint64(1+10*i), 2)
				require.NoError(t, os.Rename(at, filepath.Join(parent, name)))
			}
			names := func(group string) string {
				return readModel(t, filepath.Join(parent, group, "model2_ctx.onnx")).
					Contexts[0].PartitionName
			}
			require.Equal(t, names("a"), names("b"), "else this would prove nothing")
			var sessions []*ort.Session
			var sources []tinymodel.Model
			for _, turn := range []struct {
				group, i int
			}{{0, 0}, {1, 1}, {1, 0}, {0, 1}} {
				// each leaves a graph behind that is called like the one that comes next
				dir := filepath.Join(parent, []string{"a", "b"}[turn.group])
				require.NoError(t, os.Rename(dir, at))
				sessions = append(sessions,
					h.open(t, filepath.Join(at, "model"+itoa(turn.i+1)+"_ctx.onnx"), share, nil))
				sources = append(sources, member(uint64(1+10*turn.group), turn.i))
				require.NoError(t, os.Rename(at, dir))
			}
			for i, s := range sessions {
				requireComputes(t, s, sources[i])
			}
			for i := len(sessions) - 1; i >= 0; i-- {
				sessions[i].Release()
			}
		}},
}

// spoil changes a byte in the middle of a binary, where its weights are, and gives the file its old
// time again: only the content differs.
func spoil(t *testing.T, path string) {
	info, err := os.Stat(path)
	require.NoError(t, err)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	b := make([]byte, 1)
	_, err = f.ReadAt(b, 512)
	require.NoError(t, err)
	b[0] ^= 0x40
	_, err = f.WriteAt(b, 512)
	require.NoError(t, err)
	require.NoError(t, os.Chtimes(path, info.ModTime(), info.ModTime()))
}
