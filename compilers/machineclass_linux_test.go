package compilers_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
)

func TestMachineClass(t *testing.T) {
	cpu := compilers.DeviceFacts{Type: "CPU", VendorID: 0x8086}
	npu := compilers.DeviceFacts{Type: "NPU", VendorID: 0x8086, DeviceID: 0x7d1d}
	class := func(ep string, devices ...compilers.DeviceFacts) string {
		return compilers.MachineClass(compilers.EP{Name: ep}, devices)
	}
	processor := compilers.ProcessorClass()
	require.Regexp(t, "^cpu:[0-9a-f]{16}$", processor)
	require.Equal(t, processor, class(openVINO, cpu))
	require.Equal(t, processor, class("SomeExecutionProvider", cpu, cpu), "it may be unknown")
	require.Equal(t, "npu:8086:7d1d", class(openVINO, npu))
	require.Equal(t, "npu:8086:7d1d,"+processor, class(openVINO, npu, cpu))
	require.Equal(t, "npu:8086:7d1d", class(qnn, npu))
	require.Empty(t, class(qnn, cpu), "what is compiled ahead of time is for a device elsewhere")
	require.Empty(t, class(openVINO), "no device states anything")
	asked := compilers.Device{Type: "NPU", Metadata: map[string]string{compilers.IsVirtual: "1"}}
	virtual := compilers.EP{Name: openVINO, Devices: []compilers.Device{asked}}
	require.Empty(t, compilers.MachineClass(virtual, []compilers.DeviceFacts{npu}))

	for _, hardware := range []string{processor, "npu:8086:7d1d", "npu:8086:7d1d," + processor} {
		require.True(t, compilers.IsMachineClass(hardware), hardware)
	}
	for _, hardware := range []string{"", "6/0/60", "86", "sim-1", "Intel AVX-512", "cpu"} {
		require.False(t, compilers.IsMachineClass(hardware), hardware)
	}
	t.Setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
	require.NotEqual(t, processor, compilers.ProcessorClass(), "fewer sets are another class")
}
