//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Execution providers' own output, and ONNX Runtime's graph after it: all of it is there when it is
// told.
func TestOutputWatchSeesRealOutput(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	for _, route := range []string{compilers.RouteCompileAPI, compilers.RouteSessionOptions} {
		t.Run(route, func(t *testing.T) {
			job := writeJob(t, r, testEP(nil), tinymodel.Relu())
			job.Route = route
			var told []int64
			job.Written = func(size int64) { told = append(told, size) }
			result, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err)
			var size int64
			for _, name := range result.Files {
				info, err := os.Stat(filepath.Join(job.Dir, name))
				require.NoError(t, err)
				size += info.Size()
			}
			if len(told) == 0 { // it was over before
				require.False(t, result.Settled)
				return
			}
			require.Equal(t, []int64{size}, told)
			require.True(t, result.Settled)
		})
	}
}

// A worker that goes on after its graph is written: what it does then decides whether what was read
// meanwhile counts.
func TestSettled(t *testing.T) {
	// the worker starts in a directory of its own
	const binary, graph = "../00112233445566_ctx.bin", "../00112233445566_ctx.onnx"
	write := "echo context > " + binary + "; cat GRAPH > " + graph + "; "
	for name, c := range map[string]struct {
		before string // "": write
		after  string // what the worker does once the file exists
		want   bool
	}{
		"nothing more": {after: "true", want: true},
		"moved into place": {before: "echo context > " + binary +
			"; cp GRAPH ../g; mv ../g " + graph + "; ", after: "true", want: true},
		"its own directory": {before: "echo scratch > file; " + write,
			after: "echo scratch > file", want: true},
		"the graph again":      {after: "cat GRAPH > " + graph},
		"longer":               {after: "echo more >> " + binary},
		"other bytes, as many": {after: "echo CONTEXT > " + binary},
		"with the old times": {after: "touch -r " + binary + " keep; echo CONTEXT > " +
			binary + "; touch -r keep " + binary},
		"another file in its place": {after: "echo context > ../b; mv ../b " + binary},
		"one more":                  {after: "echo more > ../more.bin"},
		"one more in a directory":   {after: "mkdir ../more; echo more > ../more/more.bin"},
		"one less":                  {after: "rm " + binary},
	} {
		t.Run(name, func(t *testing.T) {
			job := writeJob(t, fakeRuntime(), compilers.EP{Name: openVINO}, tinymodel.Relu())
			dir := t.TempDir()
			source, told := filepath.Join(dir, "graph"), filepath.Join(dir, "told")
			node := nodeOf(epmodel.Context{Node: "n", Source: openVINO,
				CacheContext: "00112233445566_ctx.bin"}, "x", "y",
				set{"main_context": "1", "embed_mode": "0"})
			require.NoError(t, os.WriteFile(source, contextModel(node).Encode(), 0o600))
			if c.before == "" {
				c.before = write
			}
			// It goes on at once, so that what it does may be in the same tick of the clock that
			// files have their times from.
			wait := "i=0; while [ ! -e " + told + " ] && [ $i -lt 1000000 ]; do i=$((i+1)); done; "
			script := strings.ReplaceAll(c.before+wait+c.after, "GRAPH", source) + "; " + success
			o := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, script)})
			var calls atomic.Int64
			job.Written = func(size int64) {
				calls.Add(1)
				info, err := os.Stat(source)
				if err == nil {
					err = os.WriteFile(told, nil, 0o600)
				}
				if err != nil || size != info.Size()+int64(len("context\n")) {
					t.Errorf("%d bytes of output, error %v", size, err)
				}
			}
			result, err := o.Compile(t.Context(), job, nil)
			require.NoError(t, err)
			require.Equal(t, c.want, result.Settled)
			require.EqualValues(t, 1, calls.Load())
		})
	}
}

// Files have their times from a clock that goes in steps: where the kernel has nothing finer two
// changes in one step look like one.
func TestStampsShowEachChange(t *testing.T) {
	dir := t.TempDir()
	for i := range 20 {
		path := filepath.Join(dir, "file")
		require.NoError(t, os.WriteFile(path, []byte{byte(i), 0}, 0o600))
		before, err := compilers.StampsThatTell(t.Context(), dir)
		require.NoError(t, err)
		var clock unix.Timespec
		require.NoError(t, unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &clock))
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Greater(t, clock.Nano(), info.ModTime().UnixNano())
		require.NoError(t, os.WriteFile(path, []byte{byte(i), 1}, 0o600))
		after, err := compilers.StampsThatTell(t.Context(), dir)
		require.NoError(t, err)
		require.NotEqual(t, before, after)
	}
}

func TestCompileThatWritesNothingFails(t *testing.T) {
	job := writeJob(t, fakeRuntime(), compilers.EP{Name: openVINO}, tinymodel.Relu())
	o := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, "echo x > ../other; "+success)})
	job.Written = func(int64) { t.Error("called without a graph") }
	result, err := o.Compile(t.Context(), job, nil)
	require.ErrorContains(t, err, "is missing")
	require.False(t, result.Settled)
}
