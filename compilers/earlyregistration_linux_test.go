//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/stretchr/testify/require"
)

// A worker that waits for its graph registers its EP early only if that takes the device from no
// other process. The EP here refuses to register, which shows that it was asked to.
func TestEPIsRegisteredEarlyOnlyIfNoOtherProcessNeedsTheDevice(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{Fault: "fail@register"})
	job := compilers.CheckJob{Runtime: r, EPs: []compilers.EP{testEP(nil)},
		Graph: filepath.Join(t.TempDir(), "none.onnx")}
	job.Ready = make(chan struct{})

	job.Beside = true
	result, err := c.Check(t.Context(), job)
	require.NoError(t, err)
	require.Equal(t, compilers.Failed, result.Outcome)

	job.Beside = false
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err = c.Check(ctx, job)
	require.ErrorIs(t, err, context.DeadlineExceeded, "it waits with registering, too")
}
