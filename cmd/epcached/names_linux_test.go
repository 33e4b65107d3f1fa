package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// A build has the name that people know its model by, in every list and as an argument; where it
// lies is shown to the user that asked for it and to administrators, and to no other.
func TestBuildsAreKnownByHubIDOrDirectory(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	d := s.start(t)
	root := t.TempDir()
	files := map[string]string{
		"models--Org--Net/snapshots/1a2b/onnx/model.onnx": "Org/Net",
		"models--Org--Net/snapshots/1a2b/model_q4.onnx":   "Org/Net/model_q4.onnx",
		"resnet50/model.onnx":                             "resnet50/model.onnx",
	}
	seed := uint64(0)
	for file, name := range files {
		seed++
		path := filepath.Join(root, file)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, compilertest.Dense(seed, 16, 1), 0o644))
		out, code := d.epcachectl("get", path, "--ep", "OpenVINOExecutionProvider")
		require.Zero(t, code, out)
		for _, verb := range []string{"show", "why"} {
			out, code = d.epcachectl(append(strings.Fields(verb), name)...)
			require.Zero(t, code, "%s: %s", verb, out)
		}
		out, _ = d.epcachectl("rm", "-n", name)
		require.Equal(t, 1, strings.Count(out, "would delete "+name+":"), out)
	}
	for _, verb := range []string{"list", "du", "gc -n 0", "events", "pack --all -n"} {
		out, _ := d.epcachectl(strings.Fields(verb)...)
		for _, name := range files {
			require.Contains(t, out, name, verb)
		}
		require.NotContains(t, out, root, verb)
	}
	out, _ := d.epcachectl("list", "--json")
	var builds []struct {
		Name string `json:"model_name"`
		Path string `json:"model_path"`
	}
	require.NoError(t, json.Unmarshal([]byte(out), &builds))
	require.Len(t, builds, len(files))
	for _, b := range builds {
		file, err := filepath.Rel(root, b.Path)
		require.NoError(t, err)
		require.Equal(t, files[file], b.Name)
	}
	out, code := d.epcachectl("rm", "model.onnx", "-f")
	require.Zero(t, code, out)
	require.Equal(t, "deleted resnet50/model.onnx", strings.Split(out, ":")[0], "a file's own name")
}

// A daemon that is sent no path, or one that is too long, calls a model as its client does.
func TestModelsWithoutAPathHaveTheClientsName(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c := d.dial()
	model := writeModel(t, t.TempDir(), 1)
	build := get(t, c, model, func(r *wire.Acquire) {
		r.Model.Path = "/" + strings.Repeat("p", 4096)
	}).Build
	require.Equal(t, "model1.onnx", d.list()[0].ModelName)
	show, err := unixsock.Ask[wire.ShowReply](limited(t), c, &wire.Show{Entry: build}, nil)
	require.NoError(t, err)
	require.Empty(t, show.Builds[0].ModelPath)
}
