package runtimes

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A hint that recommends the driver of a device that no driver serves, or the package that is
// installed, does not help.
func TestWhyNoDevice(t *testing.T) {
	why, help := whyNoDevice("OpenVINOExecutionProvider", "AuthenticAMD")
	require.Contains(t, why, "AuthenticAMD")
	require.Contains(t, help, "use plain ONNX Runtime")
	for _, c := range [][2]string{{"OpenVINOExecutionProvider", "GenuineIntel"},
		{"QNNExecutionProvider", "AuthenticAMD"}} {
		why, help = whyNoDevice(c[0], c[1])
		require.Contains(t, why, "driver")
		require.Contains(t, help, "driver")
	}
}
