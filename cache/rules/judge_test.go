package rules

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
)

// qnnFacts is what a fingerprint of onnxruntime-qnn says on Linux x86-64, for soc_model 60. The
// EP's own version is 0.1.0 in every release.
func qnnFacts(sdk, api, build string) Facts {
	return Facts{EP: "QNNExecutionProvider", EPVersion: "0.1.0",
		SDKVersion: "v" + sdk + "." + build, HardwareArchitecture: "6/0/60",
		CompatibilityString: fmt.Sprintf("v2:6:%s:%s:0:60:0:0", sdk, api)}
}

// Releases of onnxruntime-qnn, as their fingerprints were measured.
var (
	qnn250 = qnnFacts("2.49.40", "5.49.0", "260810104044")
	qnn260 = qnnFacts("2.50.40", "5.50.0", "260831140417")
	qnn270 = qnnFacts("2.51.0", "5.51.0", "260929181845")
)

const avx512 = "Intel AVX-512 with Intel DL Boost and bfloat16 support"

// openVINOFacts is what a fingerprint of a release that writes the new strings says.
func openVINOFacts(ep, openvino, isa string) Facts {
	return Facts{EP: "OpenVINOExecutionProvider", EPVersion: ep, SDKVersion: "2026.4",
		HardwareArchitecture: isa,
		CompatibilityString: fmt.Sprintf(
			`{"ovep_compat_ver":"1.0","ovep_ver":%q,"ovep_bin_ver":"1.1","ov_compat_string":`+
				`"meta=1.0;ov=%s;isa=%s"}`, ep, openvino, isa)}
}

var (
	openVINO140 = Facts{EP: "OpenVINOExecutionProvider", EPVersion: "1.4.0+63a77bc",
		SDKVersion: "2026.1"}
	openVINO180 = openVINOFacts("1.8.0+8bf8ab3.ci.76", "2026.4.1", avx512)
	openVINO181 = openVINOFacts("1.8.1+95d534b.ci.79", "2026.4.1", avx512)
)

// earlier is a release with strings that say nothing to others.
func earlier(version string) Facts {
	return Facts{EP: "OpenVINOExecutionProvider", EPVersion: version}
}

// Each pair was tried with the vendors' libraries: loads says whether the runtime loaded the build.
func TestMeasuredPairs(t *testing.T) {
	for _, c := range []struct {
		name           string
		build, runtime Facts
		loads          bool
		verdict        compilers.Verdict
		rule           string
	}{
		{"QNN 2.7.0 its own", qnn270, qnn270, true, compilers.Optimal, "same SDK and target"},
		{"QNN 2.6.0 loads 2.5.0", qnn250, qnn260, true, compilers.PreferRecompilation,
			"newer loads older"},
		{"QNN 2.7.0 loads 2.5.0", qnn250, qnn270, true, compilers.PreferRecompilation,
			"newer loads older"},
		{"QNN 2.7.0 loads 2.6.0", qnn260, qnn270, true, compilers.PreferRecompilation,
			"newer loads older"},
		{"QNN 2.5.0 refuses 2.6.0", qnn260, qnn250, false, compilers.Unsupported,
			"older loads no newer"},
		{"QNN 2.5.0 refuses 2.7.0", qnn270, qnn250, false, compilers.Unsupported,
			"older loads no newer"},
		{"QNN 2.6.0 refuses 2.7.0", qnn270, qnn260, false, compilers.Unsupported,
			"older loads no newer"},
		{"OpenVINO 1.8.0 loads 1.8.1", openVINO181, openVINO180, true, compilers.Optimal,
			"1.8.0 and 1.8.1"},
		{"OpenVINO 1.8.1 loads 1.8.0", openVINO180, openVINO181, true, compilers.Optimal,
			"1.8.0 and 1.8.1"},
		{"OpenVINO 1.8.1 refuses 1.4.0", openVINO140, openVINO181, false, compilers.Unsupported,
			"another release"},
		{"OpenVINO 1.4.0 refuses 1.8.1", openVINO181, openVINO140, false, compilers.Unsupported,
			"another release"},
		{"OpenVINO 1.4.0 refuses 1.8.0", openVINO180, openVINO140, false, compilers.Unsupported,
			"another release"},
		{"OpenVINO 1.4.0 refuses 1.4.1", earlier("1.4.1"), openVINO140, false,
			compilers.Unsupported, "another release"},
		{"OpenVINO 1.6.1 refuses 1.5.2", earlier("1.5.2"), earlier("1.6.1"), false,
			compilers.Unsupported, "another release"},
		{"OpenVINO 1.8.0 refuses 1.7.0", earlier("1.7.0"), openVINO180, false,
			compilers.Unsupported, "another release"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := Shipped().Judge(c.build, c.runtime)
			require.Equal(t, c.verdict, j.Verdict, j.Reason)
			require.Equal(t, c.rule, j.Rule)
			require.Equal(t, c.loads, j.Verdict == compilers.Optimal ||
				j.Verdict == compilers.PreferRecompilation)
			require.NotContains(t, j.Reason, "unknown")
		})
	}
}

// The EP's own verdicts on strings, as 1.8.0 and 1.8.1 gave them; a rule must not be kinder.
func TestOpenVINORulesAgreeWithTheEP(t *testing.T) {
	edited := func(version, bin, meta, openvino, isa string) Facts {
		return Facts{EP: "OpenVINOExecutionProvider", EPVersion: version,
			CompatibilityString: fmt.Sprintf(
				`{"ovep_compat_ver":"1.0","ovep_ver":%q,"ovep_bin_ver":%q,"ov_compat_string":`+
					`"meta=%s;ov=%s;isa=%s"}`, version, bin, meta, openvino, isa)}
	}
	for name, c := range map[string]struct {
		build Facts
		want  compilers.Verdict
	}{
		"the same":          {edited("1.8.1", "1.1", "1.0", "2026.4.1", avx512), compilers.Optimal},
		"older file format": {edited("1.8.1", "1.0", "1.0", "2026.4.1", avx512), compilers.Optimal},
		"next file format": {edited("1.8.1", "2.0", "1.0", "2026.4.1", avx512),
			compilers.Unsupported},
		"next description": {edited("1.8.1", "1.1", "1.1", "2026.4.1", avx512),
			compilers.Unsupported},
		"other patch": {edited("1.8.1", "1.1", "1.0", "2026.4.0", avx512),
			compilers.Unsupported},
		"other processor": {edited("1.8.1", "1.1", "1.0", "2026.4.1", "Intel AVX2"),
			compilers.Unsupported},
	} {
		t.Run(name, func(t *testing.T) {
			j := Shipped().Judge(c.build, openVINO181)
			require.Equal(t, c.want, j.Verdict, j.Reason)
		})
	}
}

// Pairs from the vendors' documentation and sources, not measured here.
func TestDocumentedPairs(t *testing.T) {
	qnn := func(info string) Facts {
		return Facts{EP: "QNNExecutionProvider",
			CompatibilityString: info}
	}
	trt := func(sdk, arch, driver string) Facts {
		return Facts{EP: "TensorrtExecutionProvider", SDKVersion: sdk, HardwareArchitecture: arch,
			DriverVersion: driver}
	}
	rtx := func(sdk, arch string) Facts {
		return Facts{EP: "NvTensorRTRTXExecutionProvider", SDKVersion: sdk,
			HardwareArchitecture: arch}
	}
	vitis := func(version, driver, arch string) Facts {
		return Facts{EP: "VitisAIExecutionProvider", EPVersion: version, DriverVersion: driver,
			HardwareArchitecture: arch}
	}
	migraphx := func(sdk, arch string) Facts {
		return Facts{EP: "MIGraphXExecutionProvider", EPVersion: "1", SDKVersion: sdk,
			HardwareArchitecture: arch}
	}
	coreML := func(sdk, arch string) Facts {
		return Facts{EP: "CoreMLExecutionProvider", EPVersion: "1", SDKVersion: sdk,
			HardwareArchitecture: arch}
	}
	for _, c := range []struct {
		name           string
		build, runtime Facts
		want           compilers.Verdict
	}{
		{"MIGraphX: the same", migraphx("2.15.0", "gfx942"), migraphx("2.15.0", "gfx942"),
			compilers.Optimal},
		{"MIGraphX: another GPU", migraphx("2.15.0", "gfx942"), migraphx("2.15.0", "gfx1151"),
			compilers.Unsupported},
		{"MIGraphX: another release", migraphx("2.14.0", "gfx942"), migraphx("2.15.0", "gfx942"),
			compilers.Unknown},
		{"MIGraphX: states nothing", migraphx("", ""), migraphx("", ""), compilers.Unknown},
		{"Core ML: the same", coreML("1.31.1", "M4"), coreML("1.31.1", "M4"), compilers.Optimal},
		{"Core ML: another system", coreML("1.30.0", "M4"), coreML("1.31.1", "M4"),
			compilers.Unknown},
		{"QNN: another backend", qnn("v2:4:2.51.0:5.51.0:0:60:0:0"),
			qnn("v2:6:2.51.0:5.51.0:0:60:0:0"), compilers.Unsupported},
		{"QNN: generation 6x on 7x", qnn("v2:6:2.51.0:5.51.0:68:0:4:0"),
			qnn("v2:6:2.51.0:5.51.0:73:0:8:0"), compilers.Unsupported},
		{"QNN: 73 on 75", qnn("v2:6:2.51.0:5.51.0:73:0:8:0"), qnn("v2:6:2.51.0:5.51.0:75:0:8:0"),
			compilers.PreferRecompilation},
		{"QNN: 75 on 73", qnn("v2:6:2.51.0:5.51.0:75:0:8:0"), qnn("v2:6:2.51.0:5.51.0:73:0:8:0"),
			compilers.Unsupported},
		{"QNN: too much VTCM", qnn("v2:6:2.51.0:5.51.0:73:0:8:0"),
			qnn("v2:6:2.51.0:5.51.0:73:0:4:0"), compilers.Unsupported},
		{"QNN: same HTP in another SoC", qnn("v2:6:2.51.0:5.51.0:73:60:8:0"),
			qnn("v2:6:2.51.0:5.51.0:73:57:8:0"), compilers.Optimal},
		{"QNN: another SoC, HTP not stated", qnn("v2:6:2.51.0:5.51.0:0:60:0:0"),
			qnn("v2:6:2.51.0:5.51.0:0:57:0:0"), compilers.Unknown},
		{"QNN: driver of the system", qnn("v2:6:2.50.0:5.50.0:73:60:8:1"),
			qnn("v2:6:2.51.0:5.51.0:73:60:8:0"), compilers.Unsupported},
		{"QNN: string of the first form", qnn("6:2.51.0:5.51.0:3.3.3:73:0"),
			qnn("v2:6:2.50.0:5.50.0:73:60:8:0"), compilers.Unsupported},
		{"TensorRT: the same", trt("10.16.1", "86", "580.65.06"), trt("10.16.1", "86", "580.65.06"),
			compilers.Optimal},
		{"TensorRT: another version", trt("10.16.0", "86", ""), trt("10.16.1", "86", ""),
			compilers.Unsupported},
		{"TensorRT: another architecture", trt("10.16.1", "86", ""), trt("10.16.1", "89", ""),
			compilers.Unsupported},
		{"TensorRT: for all from Ampere on", trt("10.16.1", "80+", ""), trt("10.16.1", "89", ""),
			compilers.Optimal},
		{"TensorRT: for all from Ampere on, Turing", trt("10.16.1", "80+", ""),
			trt("10.16.1", "75", ""), compilers.Unknown},
		{"TensorRT: older driver", trt("10.16.1", "86", "580.65.06"), trt("10.16.1", "86", "570.1"),
			compilers.Unknown},
		{"TensorRT: version not known", trt("", "86", ""), trt("10.16.1", "86", ""),
			compilers.Unknown},
		{"TensorRT-RTX: the same", rtx("10500", "89"), rtx("10500", "89"), compilers.Optimal},
		{"TensorRT-RTX: another release", rtx("10400", "89"), rtx("10500", "89"),
			compilers.Unsupported},
		{"TensorRT-RTX: another GPU", rtx("10500", "89"), rtx("10500", "120"), compilers.Unknown},
		{"VitisAI: the same", vitis("1.8.72.0", "32.0.203.280", "STX"),
			vitis("1.8.72.0", "32.0.203.280", "STX"), compilers.Optimal},
		{"VitisAI: another EP", vitis("1.8.63.0", "32.0.203.280", "STX"),
			vitis("1.8.72.0", "32.0.203.280", "STX"), compilers.Unsupported},
		{"VitisAI: another driver", vitis("1.8.72.0", "32.0.203.237", "STX"),
			vitis("1.8.72.0", "32.0.203.280", "STX"), compilers.Unsupported},
		{"VitisAI: driver not known", vitis("1.8.72.0", "", "STX"), vitis("1.8.72.0", "", "STX"),
			compilers.Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := Shipped().Judge(c.build, c.runtime)
			require.Equal(t, c.want, j.Verdict, j.Reason)
		})
	}
}

func TestBuildsWithoutAStringAreComparedBySDK(t *testing.T) {
	build := Facts{EP: "QNNExecutionProvider", SDKVersion: "v2.51.0.260929181845"}
	require.Equal(t, compilers.Unsupported, Shipped().Judge(build, qnn250).Verdict)
	build.SDKVersion = "v2.49.40.260810109999" // another build of the same SDK
	require.Equal(t, compilers.Unknown, Shipped().Judge(build, qnn250).Verdict)
}

func TestNoRuleFitsAndWhy(t *testing.T) {
	set, err := Parse("f.toml", []byte(`
[[ep.X.rule]]
name = "newer loads older"
when.sdk_version = "build <= runtime"
verdict = "optimal"
reason = "r"

[[ep.X.rule]]
name = "same"
when.hardware_architecture = "same"
verdict = "optimal"
reason = "r"
`))
	require.NoError(t, err)
	j := set.Judge(Facts{EP: "X", SDKVersion: "2.51-rc1", HardwareArchitecture: "a"},
		Facts{EP: "X", SDKVersion: "2.51"})
	require.Equal(t, Judgement{Reason: "no rule for X fits: newer loads older: sdk_version " +
		"2.51-rc1 is not a version and cannot be compared; " +
		"same: hardware_architecture of the runtime is not known"}, j)
}

func TestRulesWithoutFactsDecideNothing(t *testing.T) {
	for name, set := range map[string]*Set{"nil": nil, "empty": {}, "shipped": Shipped()} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, Judgement{Reason: "there is no rule for StrangeExecutionProvider"},
				set.Judge(Facts{EP: "StrangeExecutionProvider"},
					Facts{EP: "StrangeExecutionProvider"}))
			require.Empty(t, set.Classify("StrangeExecutionProvider", 999, "?").Rule)
		})
	}
}

func TestFactsOfAnotherEPAreNotCompared(t *testing.T) {
	j := Shipped().Judge(qnn270, openVINO181)
	require.Equal(t, compilers.Unknown, j.Verdict)
	require.Contains(t, j.Reason, "compiled by QNNExecutionProvider")
}

// A reason is for people; the values in it come from files that anybody may have made.
func TestReasonsShowForeignValuesSafely(t *testing.T) {
	set, err := Parse("f.toml", []byte("[[ep.X.rule]]\nname = 'n'\nwhen.sdk_version = "+
		"'different'\nverdict = 'unsupported'\nreason = 'made by {build.sdk_version}'\n"))
	require.NoError(t, err)
	j := set.Judge(Facts{EP: "X", SDKVersion: "1\x1b[31m\n" + string(make([]byte, 500))},
		Facts{EP: "X", SDKVersion: "2"})
	require.NotContains(t, j.Reason, "\x1b")
	require.NotContains(t, j.Reason, "\n")
	require.Less(t, len(j.Reason), 500)
}
