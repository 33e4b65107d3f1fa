//go:build linux && (amd64 || arm64)

package ort

import (
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"testing"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

// library finds a libonnxruntime among the runtimes that tests may use. This package may not import
// compilers/compilertest, which is about workers.
func library(t *testing.T) string {
	dir := os.Getenv("EPCACHED_RUNTIMES")
	found, err := filepath.Glob(filepath.Join(dir, "*", "onnxruntime", "capi",
		"libonnxruntime.so.*"))
	require.NoError(t, err)
	if dir == "" || len(found) == 0 {
		t.Skip("NOT TESTED WITH A REAL ONNX RUNTIME: EPCACHED_RUNTIMES is not set, or holds " +
			"none; testdata/fetch-runtimes makes it")
	}
	return found[0]
}

// TestCallsUnderGarbageCollection calls from several goroutines while the collector runs all the
// time: a Go pointer that is not pinned for the whole of a call shows up here. It uses ONNX
// Runtime's own CPU EP, for vendor code in the test's process would make it fragile.
func TestCallsUnderGarbageCollection(t *testing.T) {
	api, err := Open(library(t))
	require.NoError(t, err)
	env, err := api.NewEnv(io.Discard, nil)
	require.NoError(t, err)
	defer debug.SetGCPercent(debug.SetGCPercent(1))
	model := filepath.Join(t.TempDir(), "m.onnx")
	require.NoError(t, os.WriteFile(model, compilertest.Dense(1, 32, "batch"), 0o600))
	var wait sync.WaitGroup
	failures := make(chan error, 4)
	for range cap(failures) {
		wait.Go(func() { failures <- rounds(env, model, 50) })
	}
	wait.Wait()
	close(failures)
	for err := range failures {
		require.NoError(t, err)
	}
}

func rounds(env *Env, model string, count int) error {
	var first []byte
	for range count {
		output, err := round(env, model)
		if err != nil {
			return err
		}
		if first == nil {
			first = output
		}
		if !slices.Equal(first, output) {
			return os.ErrInvalid
		}
		garbage := make([][]byte, 100)
		for i := range garbage {
			garbage[i] = make([]byte, 512)
		}
		runtime.KeepAlive(garbage)
	}
	return nil
}

func round(env *Env, model string) ([]byte, error) {
	options, err := env.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	defer options.Release()
	if err := options.FixDimension("batch", 2); err != nil {
		return nil, err
	}
	if err := options.Set("session.disable_cpu_ep_fallback", "0"); err != nil {
		return nil, err
	}
	if _, err := env.Devices(); err != nil {
		return nil, err
	}
	session, err := options.Open(model)
	if err != nil {
		return nil, err
	}
	defer session.Release()
	inputs, err := session.Inputs()
	if err != nil {
		return nil, err
	}
	inputs[0].Data = tinymodel.Floats(9, 64)
	outputs, err := session.Run(inputs)
	if err != nil {
		return nil, err
	}
	return outputs[0].Data, nil
}

func TestErrorsOfORT(t *testing.T) {
	api, err := Open(library(t))
	require.NoError(t, err)
	env, err := api.NewEnv(io.Discard, nil)
	require.NoError(t, err)
	options, err := env.NewSessionOptions()
	require.NoError(t, err)
	defer options.Release()
	_, err = options.Open("/nowhere/model.onnx")
	var status *Error
	require.ErrorAs(t, err, &status)
	require.Equal(t, 3, status.Code)
	require.Contains(t, status.Text, "/nowhere/model.onnx")
	require.Error(t, options.SetGraphOptimization("most"))
	require.Error(t, env.Register("NobodysExecutionProvider", "/nowhere/ep.so"))
}

func TestOpenRefuses(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "libonnxruntime.so")
	require.NoError(t, os.WriteFile(plain, []byte("not a library"), 0o600))
	for _, path := range []string{"/nowhere/libonnxruntime.so", plain, "libc.so.6"} {
		_, err := Open(path)
		require.ErrorContains(t, err, path)
	}
}
