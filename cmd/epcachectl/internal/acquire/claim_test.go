package acquire

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestClaimIsCompiledAsItWasAskedFor(t *testing.T) {
	r := &Request{embed: true, dims: map[string]int64{"batch": 1}, output: &wire.Output{
		ExternalInitializersFile: "rest.bin", ExternalInitializersThreshold: 64,
		KeepInitializersInSource: true}}
	job := (&claimant{}).job("/directory", "/model.onnx", r,
		&wire.AcquireReply{Claim: &wire.Claim{Output: "x_ctx.onnx", Route: "compile_api"}})
	require.Equal(t, compilers.Initializers{File: "rest.bin", Threshold: 64, InSource: true},
		job.Initializers)
	require.Equal(t, map[string]int64{"batch": 1}, job.FreeDimensions)
	require.True(t, job.Embed)
	require.Equal(t, "x_ctx.onnx", job.Output)
}
