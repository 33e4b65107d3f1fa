package standin_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/stretchr/testify/require"
)

func runtime(t *testing.T, sdk string) compilers.Runtime {
	r, err := standin.Library(t.TempDir(), "1.31.1", standin.SDK{Version: sdk, Hardware: "sim-1"})
	require.NoError(t, err)
	require.Equal(t, standin.EP, r.EPs[0].EP)
	return r
}

func job(t *testing.T, r compilers.Runtime, fault standin.Fault) compilers.Job {
	dir := t.TempDir()
	model := filepath.Join(dir, "m.onnx")
	require.NoError(t, os.WriteFile(model, compilertest.Dense(1, 8, "batch"), 0o600))
	return compilers.Job{Runtime: r, Model: model, Dir: dir, Output: "00_ctx.onnx",
		EPs: []compilers.EP{{Name: standin.EP, Options: map[string]string{"fault": string(fault)}}}}
}

func TestFaults(t *testing.T) {
	c := standin.New()
	c.Limits = compilers.Limits{Wall: 50 * time.Millisecond, Output: 1 << 20}
	r := runtime(t, "1.0")
	for fault, check := range map[standin.Fault]func(error){
		standin.Hang: func(err error) { require.ErrorIs(t, err, compilers.ErrTimeout) },
		standin.Crash: func(err error) {
			var e *compilers.ExitError
			require.ErrorAs(t, err,
				&e)
		},
		standin.Killed: func(err error) {
			var e *compilers.ExitError
			require.ErrorAs(t, err,
				&e)
		},
		standin.Refuse: func(err error) {
			var e *compilers.RefusedError
			require.ErrorAs(t, err,
				&e)
		},
		standin.Huge:     func(err error) { require.ErrorIs(t, err, compilers.ErrOutput) },
		standin.Links:    func(err error) { require.ErrorIs(t, err, compilers.ErrOutput) },
		standin.NoOutput: func(err error) { require.ErrorIs(t, err, compilers.ErrOutput) },
		standin.Garbage:  func(err error) { require.Error(t, err) },
		standin.NoNodes: func(err error) {
			var e *compilers.NoNodesError
			require.ErrorAs(t, err,
				&e)
		},
		"unheard of": func(err error) { require.ErrorIs(t, err, compilers.ErrOption) },
		// These pass the compiler and are for the cache's own validation to find.
		standin.Slow:     func(err error) { require.NoError(t, err) },
		standin.Missing:  func(err error) { require.NoError(t, err) },
		standin.Escape:   func(err error) { require.NoError(t, err) },
		standin.Residue:  func(err error) { require.NoError(t, err) },
		standin.Mutilate: func(err error) { require.NoError(t, err) },
	} {
		t.Run(string(fault), func(t *testing.T) {
			_, err := c.Compile(t.Context(), job(t, r, fault), nil)
			check(err)
		})
	}
}

func TestUpdateOfTheSDK(t *testing.T) {
	c := standin.New()
	ep := compilers.EP{Name: standin.EP}
	strings := []string{"standin:1.0:sim-1", "standin:1.1:sim-1", "standin:2.0:sim-1",
		"standin:1.0:sim-2", "else"}
	verdicts, err := c.Compatibility(t.Context(), runtime(t, "1.0"), ep, strings)
	require.NoError(t, err)
	require.Equal(t,
		[]compilers.Verdict{compilers.Optimal, compilers.PreferRecompilation, compilers.Unsupported,
			compilers.Unsupported, compilers.Unknown}, verdicts)
	verdicts, err = c.Compatibility(t.Context(), runtime(t, "2.0"), ep, strings[:1])
	require.NoError(t, err)
	require.Equal(t, []compilers.Verdict{compilers.Unsupported}, verdicts)
}

func TestEqualJobsGiveEqualBytes(t *testing.T) {
	c, r := standin.New(), runtime(t, "1.0")
	first, second := job(t, r, ""), job(t, r, "")
	for _, j := range []compilers.Job{first, second} {
		_, err := c.Compile(t.Context(), j, nil)
		require.NoError(t, err)
	}
	for _, name := range []string{"00_ctx.onnx", "00_ctx.bin"} {
		a, err := os.ReadFile(filepath.Join(first.Dir, name))
		require.NoError(t, err)
		b, err := os.ReadFile(filepath.Join(second.Dir, name))
		require.NoError(t, err)
		require.Equal(t, a, b)
	}
	require.EqualValues(t, 2, c.Compiles.Load())
}
