package config

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func loadPipeline(t *testing.T, text string) (*Pipeline, string, error) {
	file := filepath.Join(t.TempDir(), "pipeline.toml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	p, err := LoadPipeline(file)
	return p, filepath.Dir(file), err
}

func TestPipelineEntriesOverrideDefaults(t *testing.T) {
	p, dir, err := loadPipeline(t, `
ep = ["A:CPU"]
options = { one = 1, two = true, three = "x" }
dims = { batch = 1, height = 320 }
optimization_level = "basic"

[[model]]
path = "det.onnx"
dims = { height = 640 }
options = { one = "2" }
session_options = { "session.x64quantprecision" = true }

[[group]]
models = ["/m/prefill.onnx", "sub/decode.onnx"]
optimization_level = "all"

[[model]]
path = "rec.onnx"
ep = ["B", "C:NPU"]
options = { "B/soc_model" = 60 }
embed = true
dims_by_denotation = { DATA_BATCH = 2 }
`)
	require.NoError(t, err)
	for i := range p.Requests {
		p.Requests[i].from = nil
	}
	common := map[string]string{"one": "1", "two": "true", "three": "x"}
	require.Equal(t, []PipelineRequest{
		{Models: []string{filepath.Join(dir, "det.onnx")}, EPs: []string{"A:CPU"},
			Level:          "basic",
			Options:        map[string]string{"one": "2", "two": "true", "three": "x"},
			Dims:           map[string]int64{"batch": 1, "height": 640},
			SessionOptions: map[string]string{"session.x64quantprecision": "true"}},
		{Models: []string{filepath.Join(dir, "rec.onnx")}, EPs: []string{"B", "C:NPU"},
			Level: "basic", Embed: true,
			Options:     map[string]string{"B/soc_model": "60"},
			Dims:        map[string]int64{"batch": 1, "height": 320},
			Denotations: map[string]int64{"DATA_BATCH": 2}},
		{Models: []string{"/m/prefill.onnx", filepath.Join(dir, "sub/decode.onnx")},
			EPs: []string{"A:CPU"}, Level: "all",
			Options: common, Dims: map[string]int64{"batch": 1, "height": 320}},
	}, p.Requests)
}

func TestPipelineErrorsNameTheirPlace(t *testing.T) {
	for name, c := range map[string]struct{ text, says string }{
		"not TOML": {"[[model]\n", ":1:"},
		"nothing":  {"ep = [\"A\"]\n", ":1:1: no [[model]] or [[group]] is listed"},
		"unknown field": {"[[model]]\npath = \"a\"\ndim = { x = 1 }\n",
			`:3:1: unknown field "model[1].dim"; did you mean "dims"?`},
		"unknown at the top": {"eps = [\"A\"]\n[[model]]\npath = \"a\"\n",
			`:1:1: unknown field "eps"`},
		"no path":         {"\n[[model]]\nep = [\"A\"]\n", `:2:3: field "model[1]": no path`},
		"path of a group": {"[[group]]\npath = \"a\"\n", `:1:3: field "group[1]": no models`},
		"one of a group": {"[[group]]\nmodels = [\"a\"]\n",
			`:2:1: field "group[1].models": a group has two models or more`},
		"size of nothing": {"[[model]]\npath = \"a\"\ndims = { batch = 0 }\n",
			`:3:10: field "model[1].dims.batch": 0 is not 1`},
		"size in words": {"[[model]]\npath = \"a\"\n[model.dims]\nbatch = \"one\"\n",
			`:4:1: field "model[1].dims.batch": it is a text and must be a whole number`},
		"option of a list": {"[[model]]\npath = \"a\"\noptions = { a = [1] }\n",
			`:3:13: field "model[1].options.a": it is an array`},
		"ep as a text": {"[[model]]\npath = \"a\"\nep = \"A\"\n",
			`:3:1: field "model[1].ep": it is a text and must be an array in brackets`},
		"level": {"[[model]]\npath = \"a\"\noptimization_level = \"most\"\n",
			`:3:1: field "model[1].optimization_level"`},
		"embedded group": {"embed = true\n[[group]]\nmodels = [\"a\", \"b\"]\n",
			`:1:1: field "embed": it cannot be used for groups`},

		"size too large": {"[[model]]\npath = \"a\"\ndims = { batch = 9223372036854775807 }\n",
			`:3:10: field "model[1].dims.batch": 9223372036854775807 is not 1 to ` +
				`4611686018427387904`},
	} {
		t.Run(name, func(t *testing.T) {
			_, dir, err := loadPipeline(t, c.text)
			require.Error(t, err)
			require.Contains(t, err.Error(), filepath.Join(dir, "pipeline.toml")+c.says)
		})
	}
	_, err := LoadPipeline(filepath.Join(t.TempDir(), "none.toml"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// A named pipe that nothing writes to is read as an empty file, and not waited for.
func TestPipelineFromANamedPipe(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(file, 0o600))
	_, err := LoadPipeline(file)
	require.EqualError(t, err, file+":1:1: no [[model]] or [[group]] is listed")
}
