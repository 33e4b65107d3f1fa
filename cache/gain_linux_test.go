//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// urgent compares loads at the usual priority, so that a busy machine does not hold up the test.
type urgent struct{ compilers.Compiler }

func (u urgent) Check(ctx context.Context,
	job compilers.CheckJob) (compilers.CheckResult, error) {
	job.Pace = compilers.Pace{}
	return u.Compiler.Check(ctx, job)
}

// A build of a real EP is loaded beside its source once it is stored, and found to be the faster
// one.
func TestGainOfARealBuildIsMeasured(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	b := newBenchWith(t, func(o *Options) {
		o.Compiler, o.Runtimes, o.Policies = urgent{ort}, []compilers.Runtime{r}, nil
	})
	b.cache.gains.Limit = time.Minute
	path := filepath.Join(b.TempDir(), "m.onnx")
	require.NoError(t, os.WriteFile(path, compilertest.Dense(64, 256, 1), 0o644))
	asked := b.request(b.openFile(path))
	asked.EPs = []identity.EP{{Name: "OpenVINOExecutionProvider"}}
	require.Equal(t, request.Compiled, b.acquire(asked).Outcome)
	b.cache.gains.Wait()
	g := b.gain()
	require.Positive(t, g.Load)
	require.Greater(t, g.SourceLoad, g.Load)
	require.Empty(t, b.cache.gains.ForBuild(b.list()[0].Build.ID).Warnings())
}
