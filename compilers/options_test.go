package compilers

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTableIsWellFormed(t *testing.T) {
	kinds := []string{"bool", "int", "string", "json"}
	policies := []Policy{Allowed, LibraryName, FileName, RefusedByUse, Superseded}
	for _, name := range EPNames() {
		info, ok := EPByName(name)
		require.True(t, ok)
		require.Equal(t, len(info.Packages) == 0, len(info.Libraries) == 0,
			"%s: an EP that is part of ONNX Runtime has neither", name)
		for option, o := range info.Options {
			require.Contains(t, kinds, o.Kind, "%s %s", name, option)
			require.Contains(t, policies, o.Policy, "%s %s", name, option)
			if o.Default != "" {
				canonical, err := CanonicalValue(o.Kind, o.Default)
				require.NoError(t, err)
				require.Equal(t, canonical, o.Default,
					"%s %s: a default must be canonical to be recognised", name, option)
			}
		}
		for _, option := range info.FingerprintOptions {
			require.Contains(t, info.Options, option, name)
		}
	}
}

func TestTableRefusesUnknownFields(t *testing.T) {
	require.Error(t, AddEPs([]byte("[ep.X]\nlibary = []\n")))
	require.Error(t, AddEPs([]byte("[ep.X]\nhardware = '('\n")))
}

func epInfo(t *testing.T, name string) EPInfo {
	info, ok := EPByName(name)
	require.True(t, ok)
	return info
}

func TestEqualOptionsBecomeEqual(t *testing.T) {
	for _, c := range []struct {
		name, ep string
		a, b     map[string]string
	}{
		{"truth", "QNNExecutionProvider", map[string]string{"enable_htp_fp16_precision": "True"},
			map[string]string{"enable_htp_fp16_precision": "1"}},
		{"numbers", "QNNExecutionProvider", map[string]string{"soc_model": "060"},
			map[string]string{"soc_model": "60"}},
		{"explicit default", "QNNExecutionProvider",
			map[string]string{"backend_path": "libQnnHtp.so", "vtcm_mb": "0"}, nil},
		{"json", "OpenVINOExecutionProvider",
			map[string]string{"load_config": `{"CPU": {"B": 1, "A": "<x>"}}`},
			map[string]string{"load_config": `{"CPU":{"A":"<x>","B":1}}`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, _, err := epInfo(t, c.ep).Normalize(c.a, false)
			require.NoError(t, err)
			b, _, err := epInfo(t, c.ep).Normalize(c.b, false)
			require.NoError(t, err)
			require.Equal(t, b, a)
		})
	}
}

func TestRefusedOptions(t *testing.T) {
	for name, options := range map[string]map[string]string{
		"library by path":         {"backend_path": "/tmp/evil.so"},
		"library by way of a dot": {"backend_path": "../evil.so"},
		"library without a name":  {"backend_path": ""},
		"writes":                  {"dump_qnn_ir_dlc_dir": "/tmp"},
		"runs code":               {"op_packages": "x:/tmp/evil.so:y"},
		"unknown":                 {"no_such_option": "1"},
		"not a number":            {"soc_model": "sixty"},
		"not a truth":             {"enable_htp_fp16_precision": "perhaps"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := epInfo(t, "QNNExecutionProvider").Normalize(options, false)
			require.ErrorIs(t, err, ErrOption)
		})
	}
	_, _, err := epInfo(t, "OpenVINOExecutionProvider").
		Normalize(map[string]string{"load_config": `{} {}`}, false)
	require.ErrorIs(t, err, ErrOption)
}

func TestUnknownOptionsMayBeAllowed(t *testing.T) {
	normal, unknown, err := epInfo(t, "QNNExecutionProvider").
		Normalize(map[string]string{"new_b": " x", "new_a": "y"}, true)
	require.NoError(t, err)
	require.Equal(t, []string{"new_a", "new_b"}, unknown)
	require.Equal(t, map[string]string{"new_b": " x", "new_a": "y"}, normal)
}

func TestResolveFillsInTheBackend(t *testing.T) {
	info := epInfo(t, "QNNExecutionProvider")
	require.Equal(t, map[string]string{"backend_path": "/r/qnn/libQnnHtp.so"},
		info.Resolve("/r/qnn/ep.so", nil))
	require.Equal(t, map[string]string{"backend_path": "/r/qnn/libQnnGpu.so"},
		info.Resolve("/r/qnn/ep.so", map[string]string{"backend_path": "libQnnGpu.so"}))
	require.Equal(t, map[string]string{"backend_type": "ir"},
		info.Resolve("/r/qnn/ep.so", map[string]string{"backend_type": "ir"}))
	require.Equal(t, map[string]string{"soc_model": "60"},
		info.ForFingerprint(map[string]string{"soc_model": "60", "vtcm_mb": "8"}))
}

func TestFingerprintsOfProvidersWithUnknownOptionsKeepAll(t *testing.T) {
	backend := map[string]string{"backend": "migraphx"}
	require.Equal(t, backend, epInfo(t, "AMDGPUExecutionProvider").ForFingerprint(backend))
	require.Equal(t, backend, EPInfo{}.ForFingerprint(backend))
}

func TestHardwareInTheCompatibilityString(t *testing.T) {
	require.Equal(t, "6/0/60", epInfo(t, "QNNExecutionProvider").
		HardwareOf("v2:6:2.51.0:5.51.0:0:60:0:0"))
	require.Equal(t, "6/73,75/57,60", epInfo(t, "QNNExecutionProvider").
		HardwareOf("v2:6:2.51.0:5.51.0:73,75:57,60:8,8:0"))
	require.Equal(t, "Intel AVX10.1 and Intel AMX",
		epInfo(t, "OpenVINOExecutionProvider").
			HardwareOf(
				`{"ovep_ver":"1.8.1","ov_compat_string":"meta=1.0;ov=2026.4.1;isa=Intel AVX10.1 `+
					`and Intel AMX"}`))
	require.Empty(t, epInfo(t, "QNNExecutionProvider").HardwareOf("else"))
}
