//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/stretchr/testify/require"
)

// compileAPI has what ONNX Runtime's compile API promises, function by function. The worker uses it
// from file to file; what else there is has to give the same, or it would have to be part of a
// request.
var compileAPI = []guideline{
	{"no output is named: beside the model, as NAME_ctx.onnx", func(t *testing.T, h host) {
		dir := t.TempDir()
		h.compileBy(t, ort.Compilation{ModelPath: write(t, dir, "m.onnx", layers(1, 1, false))},
			nil)
		require.Equal(t, []string{"m.onnx", "m_ctx.onnx", "m_epcachedtest.bin"}, listing(t, dir))
	}},
	{"into a buffer, or as a stream: the same bytes as into a file", func(t *testing.T, h host) {
		for _, embed := range []bool{true, false} {
			dir, made := t.TempDir(), t.TempDir()
			model := write(t, dir, "m.onnx", layers(1, 2, true))
			c := ort.Compilation{ModelPath: model, OutputPath: filepath.Join(made, "m_ctx.onnx"),
				Embed: embed}
			h.compileBy(t, c, nil)
			file, err := os.ReadFile(c.OutputPath)
			require.NoError(t, err)
			if c.OutputPath = ""; !embed {
				c.BinaryDir, c.BinaryModel = t.TempDir()+"/", "m.onnx"
			}
			c.Buffer = true
			require.Equal(t, file, h.compileBy(t, c, nil))
			var stream bytes.Buffer
			c.Buffer, c.Write = false, func(piece []byte) error {
				_, err := stream.Write(piece)
				return err
			}
			h.compileBy(t, c, nil)
			require.Equal(t, file, stream.Bytes())
			if !embed {
				require.Equal(t, []string{"m_epcachedtest.bin"}, listing(t, c.BinaryDir),
					"where SetEpContextBinaryInformation says")
			}
		}
	}},
	{"from a buffer: the same but for the source's name", func(t *testing.T, h host) {
		model, made := layers(1, 2, true), t.TempDir()
		c := ort.Compilation{Model: model.Encode(), OutputPath: filepath.Join(made, "x_ctx.onnx")}
		h.compileBy(t, c, nil)
		h.requireLoads(t, c.OutputPath, model, nil, nil)
		require.Empty(t, readModel(t, c.OutputPath).Contexts[0].ONNXModelFilename)
		binary, err := os.ReadFile(filepath.Join(made, "x_epcachedtest.bin"))
		require.NoError(t, err)
		h.compileBy(t,
			ort.Compilation{ModelPath: write(t, t.TempDir(), "m.onnx", model),
				OutputPath: c.OutputPath}, nil)
		again, err := os.ReadFile(filepath.Join(made, "x_epcachedtest.bin"))
		require.NoError(t, err)
		require.Len(t, again, len(binary))
	}},
	{"from a buffer, external data from its directory", func(t *testing.T, h host) {
		model, dir := layers(1, 2, false), t.TempDir()
		c := ort.Compilation{Model: externalized(t, dir, model).Encode(),
			OutputPath: filepath.Join(t.TempDir(), "x_ctx.onnx")}
		h.compileBy(t, c, set{"session.model_external_initializers_file_folder_path": dir})
		h.requireLoads(t, c.OutputPath, model, nil, nil)
	}},
	{"from a buffer, external data from memory", func(t *testing.T, h host) {
		model, dir := layers(1, 2, false), t.TempDir()
		c := ort.Compilation{Model: externalized(t, dir, model).Encode(),
			OutputPath: filepath.Join(t.TempDir(), "x_ctx.onnx")}
		data, err := os.ReadFile(filepath.Join(dir, "m.data"))
		require.NoError(t, err)
		require.NoError(t, os.RemoveAll(dir))
		o := h.options(t, nil, nil)
		free, err := o.AddExternalFile("m.data", data)
		require.NoError(t, err)
		defer free()
		_, err = o.Compile(c)
		require.NoError(t, err)
		h.requireLoads(t, c.OutputPath, model, nil, nil)
	}},
	{"ERROR_IF_NO_NODES_COMPILED", func(t *testing.T, h host) {
		c := ort.Compilation{Model: negation(),
			OutputPath: filepath.Join(t.TempDir(), "x_ctx.onnx")}
		h.compileBy(t, c, nil) // without the flag a model that nothing was compiled of
		require.Empty(t, readModel(t, c.OutputPath).Contexts)
		require.NoError(t, os.Remove(c.OutputPath))
		c.Flags = ort.ErrorIfNoNodesCompiled
		_, err := h.options(t, nil, nil).Compile(c)
		var status *ort.Error
		require.ErrorAs(t, err, &status)
		require.Equal(t, plainFail, status.Code)
		require.NoFileExists(t, c.OutputPath)
	}},
	{"ERROR_IF_OUTPUT_FILE_EXISTS", func(t *testing.T, h host) {
		dir := t.TempDir()
		c := ort.Compilation{ModelPath: write(t, dir, "m.onnx", layers(1, 1, false)),
			OutputPath: write(t, dir, "x_ctx.onnx", layers(2, 1, false))}
		c.Flags = ort.ErrorIfOutputFileExists
		_, err := h.options(t, nil, nil).Compile(c)
		require.ErrorContains(t, err, "x_ctx.onnx")
		require.Empty(t, readModel(t, c.OutputPath).Contexts, "what was there is there")
		c.Flags = 0
		h.compileBy(t, c, nil)
		require.Len(t, readModel(t, c.OutputPath).Contexts, 1, "without the flag it is replaced")
	}},
	{"external initializers file: those of nodes outside, from a size on",
		func(t *testing.T, h host) {
			for threshold, want := range map[int64]int{0: 4, 64: 4, 65: 2, 1024: 2, 1025: 0} {
				dir := t.TempDir()
				c := ort.Compilation{ModelPath: write(t, t.TempDir(), "m.onnx",
					layers(1, 2, false)), OutputPath: filepath.Join(dir, "x_ctx.onnx"),
					InitializersFile: "rest.bin", InitializersThreshold: threshold}
				_, err := h.options(t, nil, set{"ops": "Mul,Relu"}).Compile(c)
				require.NoError(t, err)
				require.Equal(t, want, outside(t, c.OutputPath), "threshold %d", threshold)
				h.requireLoads(t, c.OutputPath, layers(1, 2, false), nil, nil)
			}
		}},
	{"initializer location: asked for each, with the source's place, and the data",
		func(t *testing.T, h host) {
			source := layers(1, 2, false)
			from, to := t.TempDir(), t.TempDir()
			own, err := os.Create(filepath.Join(to, "own.bin"))
			require.NoError(t, err)
			defer own.Close() // what is written is read below
			var size int64
			c := ort.Compilation{ModelPath: write(t, from, "m.onnx", externalized(t, from, source)),
				OutputPath: filepath.Join(to, "x_ctx.onnx"),
				Location: func(i ort.Initializer) (*ort.Place, error) {
					require.Equal(t, "m.data", i.Place.File)
					require.EqualValues(t, len(i.Data), i.Place.Size)
					if strings.HasPrefix(i.Name, "b") {
						return nil, nil // into the model
					}
					n, err := own.Write(i.Data)
					size += int64(n)
					return &ort.Place{File: "own.bin", Offset: size - int64(n), Size: int64(n)}, err
				}}
			_, err = h.options(t, nil, set{"ops": "Mul,Relu"}).Compile(c)
			require.NoError(t, err)
			require.Equal(t, 2, outside(t, c.OutputPath))
			require.NoError(t, os.RemoveAll(from))
			h.requireLoads(t, c.OutputPath, source, nil, nil)
		}},
	{"initializer location: an error ends the compile, in its own words",
		func(t *testing.T, h host) {
			refused := errors.New("no place for it")
			c := ort.Compilation{ModelPath: write(t, t.TempDir(), "m.onnx", layers(1, 2, false)),
				OutputPath: filepath.Join(t.TempDir(), "x_ctx.onnx"),
				Location:   func(ort.Initializer) (*ort.Place, error) { return nil, refused }}
			_, err := h.options(t, nil, set{"ops": "Mul,Relu"}).Compile(c)
			require.ErrorIs(t, err, refused)
		}},
	{"a stream that nobody takes is an error, in its own words", func(t *testing.T, h host) {
		full := errors.New("no free space")
		_, err := h.options(t, nil, nil).
			Compile(ort.Compilation{Model: layers(1, 1, false).Encode(), Embed: true,
				Write: func([]byte) error { return full }})
		require.ErrorIs(t, err, full)
	}},
}

// compileBy compiles with the test EP's first device, and gives the buffer where one is asked for.
func (h host) compileBy(t *testing.T, c ort.Compilation, session set) []byte {
	made, err := h.options(t, session, nil).Compile(c)
	require.NoError(t, err)
	return made
}

// outside counts the initializers that a model has in files. ONNX Runtime 1.24 writes those that it
// asked a place for behind those of the source, and takes the later one of two when it loads.
func outside(t *testing.T, path string) int {
	places := map[string]string{}
	for _, i := range tensorsOf(t, path) {
		places[i.Name] = i.Location
	}
	maps.DeleteFunc(places, func(_, location string) bool { return location == "" })
	return len(places)
}
