//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

const (
	oldestORT = "1.24.4" // that is supported
	newestORT = "1.31.1"
)

func TestTestEP(t *testing.T) {
	for _, version := range []string{oldestORT, newestORT} {
		t.Run(version, func(t *testing.T) {
			suite(t, subject{
				Compiler: newORT(t, compilers.ORTOptions{}),
				Runtime:  compilertest.TestEPRuntime(t, version, compilertest.Release{}),
				EP:       testEP(nil), NoNodesModel: negation(), Verdict: compilers.Optimal,
				Loads: true, GroupsLoad: true,
			})
		})
	}
}

// negation has an operator that the test EP does not know.
func negation() []byte {
	one := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{1}}
	}
	return tinymodel.Model{
		Nodes:  []tinymodel.Node{{Op: "Neg", Inputs: []string{"x"}, Outputs: []string{"y"}}},
		Inputs: []tinymodel.Value{one("x")}, Outputs: []tinymodel.Value{one("y")},
	}.Encode()
}

// testEP is the test EP on its first device.
func testEP(options map[string]string) compilers.EP { return testEPOn("0", options) }

func testEPOn(device string, options map[string]string) compilers.EP {
	return compilers.EP{Name: compilertest.TestEP,
		Devices: []compilers.Device{{Metadata: map[string]string{"device_id": device}}},
		Options: options}
}

func TestTestEPReportsItsRelease(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := compilertest.TestEPRuntime(t, newestORT,
		compilertest.Release{Version: "3.2.1", SDK: "7.8.9", Driver: "550.1",
			Hardware: [2]string{"v1", "v2"}})
	facts, err := c.Probe(t.Context(), r)
	require.NoError(t, err)
	require.Len(t, facts.EPs[0].Devices, 2)
	for i, d := range facts.EPs[0].Devices {
		require.Equal(t, []string{fmt.Sprint(i), "550.1", fmt.Sprint("v", i+1), "3.2.1"},
			[]string{d.EPMetadata["device_id"], d.EPMetadata["os_driver_version"],
				d.EPMetadata["hardware_architecture"], d.EPMetadata["version"]})
	}
	for i, device := range []string{"0", "1"} {
		prints, err := c.Fingerprint(t.Context(), r, []compilers.EP{testEPOn(device, nil)}, nil)
		require.NoError(t, err)
		hardware := fmt.Sprint("v", i+1)
		require.Equal(t,
			[]string{"7.8.9", hardware, "epcachedtest;format=1;sdk=7.8.9;hw=" + hardware, "3.2.1",
				"550.1"},
			[]string{prints[0].SDKVersion, prints[0].HardwareArchitecture,
				prints[0].CompatibilityString, prints[0].EPVersion, prints[0].DriverVersion})
	}
}

func TestTestEPReportsCompatibility(t *testing.T) {
	four := []compilers.Verdict{compilers.Unknown, compilers.Optimal, compilers.PreferRecompilation,
		compilers.Unsupported}
	const own = "epcachedtest;format=1;sdk=1.0.0;hw=sim-1"
	judge := func(t *testing.T, version string, release compilertest.Release, env []string,
		infos ...string) []compilers.Verdict {
		c := newORT(t, compilers.ORTOptions{Env: env})
		verdicts, err := c.Compatibility(t.Context(),
			compilertest.TestEPRuntime(t, version, release), testEP(nil), infos)
		require.NoError(t, err)
		return verdicts
	}
	for _, version := range []string{oldestORT, "1.28.0", newestORT} {
		t.Run("by the string, ONNX Runtime "+version, func(t *testing.T) {
			require.Equal(t, four,
				judge(t, version, compilertest.Release{SDK: "1.1.0"}, nil, "nobody's",
					"epcachedtest;format=1;sdk=1.1.0;hw=sim-2", own,
					"epcachedtest;format=1;sdk=2.0.0;hw=sim-1"))
		})
	}
	t.Run("other hardware, format or nothing is unsupported", func(t *testing.T) {
		for _, v := range judge(t, newestORT, compilertest.Release{}, nil,
			"epcachedtest;format=1;sdk=1.0.0;hw=sim-3", "epcachedtest;format=2;sdk=1.0.0;hw=sim-1",
			"epcachedtest;") {
			require.Equal(t, compilers.Unsupported, v)
		}
	})
	for i, name := range []string{"not_applicable", "optimal", "prefer_recompilation",
		"unsupported"} {
		t.Run("set by the release: "+name, func(t *testing.T) {
			require.Equal(t, four[i:i+1],
				judge(t, newestORT, compilertest.Release{Verdict: name}, nil, own))
		})
	}
	t.Run("set by the environment", func(t *testing.T) {
		require.Equal(t, four[2:3],
			judge(t, newestORT, compilertest.Release{},
				[]string{"EPCACHED_TEST_EP_VERDICT=prefer_recompilation"}, own))
	})
}

// Another release of the EP loads the binaries that it says it loads, and no others. ONNX Runtime
// asks it before it loads.
func TestTestEPLoadsOtherReleases(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	job := writeJob(t, r, testEP(nil), layers(1, 1, false).Encode())
	result, err := c.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	for _, row := range []struct {
		name    string
		release compilertest.Release
		ep      compilers.EP
		entries map[string]string
		outcome string
		says    string
	}{
		{"the same", compilertest.Release{}, testEP(nil), nil, compilers.Passed, ""},
		{"another driver", compilertest.Release{Driver: "2.0"}, testEP(nil), nil, compilers.Passed,
			""},
		{"minor version", compilertest.Release{SDK: "1.4.2"}, testEP(nil), nil, compilers.Passed,
			""},
		{"minor version, where only the best will do", compilertest.Release{SDK: "1.4.2"},
			testEP(nil), map[string]string{"session.fail_on_suboptimal_compiled_model": "1"},
			compilers.Failed, "suboptimal"},
		{"major version", compilertest.Release{SDK: "2.0.0"}, testEP(nil), nil, compilers.Failed,
			"not supported"},
		{"hardware", compilertest.Release{Hardware: [2]string{"sim-9"}}, testEP(nil), nil,
			compilers.Failed, "not supported"},
		{"another device", compilertest.Release{}, testEPOn("1", nil), nil, compilers.Failed,
			"sim-2"},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := compilertest.InstallTestEP(t, r.Directory, row.release)
			check, err := c.Check(t.Context(),
				compilers.CheckJob{Runtime: r, EPs: []compilers.EP{row.ep},
					Graph:   filepath.Join(job.Dir, result.Graph),
					Session: compilers.Session{SessionOptions: row.entries}})
			require.NoError(t, err)
			require.Equal(t, row.outcome, check.Outcome, check.Text)
			require.Contains(t, check.Text, row.says)
		})
	}
}

// A compiled model computes the same as its source model, by both routes, in both forms, in one
// partition or several.
func TestTestEPComputes(t *testing.T) {
	source := layers(5, 3, true)
	for _, row := range []struct {
		name, version string
		edit          func(*compilers.Job)
		files         int
	}{
		{"compile api, sidecar", newestORT, func(*compilers.Job) {}, 2},
		{"compile api, embedded", newestORT, func(j *compilers.Job) { j.Embed = true }, 1},
		{"session options, sidecar", newestORT,
			func(j *compilers.Job) { j.Route = compilers.RouteSessionOptions }, 2},
		{"session options, embedded", newestORT,
			func(j *compilers.Job) { j.Route, j.Embed = compilers.RouteSessionOptions, true }, 1},
		{"several primaries", newestORT,
			func(j *compilers.Job) { j.EPs[0].Options = map[string]string{"primaries": "each"} },
			4},
		{"one partition per node", newestORT,
			func(j *compilers.Job) { j.EPs[0].Options = map[string]string{"partition": "node"} },
			2},
		{"nodes left to the cpu", newestORT,
			func(j *compilers.Job) { j.EPs[0].Options = map[string]string{"ops": "Relu"} }, 2},
		{"oldest onnx runtime", oldestORT, func(*compilers.Job) {}, 2},
		{"onnx runtime between", "1.28.0", func(*compilers.Job) {}, 2},
	} {
		t.Run(row.name, func(t *testing.T) {
			c := newORT(t, compilers.ORTOptions{})
			r := compilertest.TestEPRuntime(t, row.version, compilertest.Release{})
			job := writeJob(t, r, testEP(nil), source.Encode())
			row.edit(&job)
			result, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err)
			require.Len(t, result.Files, row.files)
			require.NoError(t, os.Remove(job.Model))
			data := compilertest.Outputs(t,
				compilers.CheckJob{Runtime: r, EPs: job.EPs,
					Graph: filepath.Join(job.Dir, result.Graph)}, 7)
			values := map[string][]float32{"x": workerInput(7, 2*width)}
			evaluate(source, values)
			require.InDeltaSlice(t, values["y"], floats(data), 1e-4)
		})
	}
}

// workerInput returns the floats that a worker feeds from a seed: see cmd/epcached-ort.
func workerInput(seed uint64, count int) []float32 {
	random := rand.New(rand.NewPCG(seed, 2))
	var values []float32
	for range count {
		values = append(values, 2*random.Float32()-1)
	}
	return values
}

func TestTestEPFaults(t *testing.T) {
	limits := compilers.Limits{Wall: time.Second}
	for _, fault := range [][2]string{
		{"crash", "register"}, {"crash", "probe"}, {"crash", "judge"}, {"crash", "create"},
		{"crash", "compile"}, {"crash", "load"}, {"crash", "run"},
		{"fail", "register"}, {"fail", "judge"}, {"fail", "create"}, {"fail", "run"},
		{"abort", "compile"}, {"exit", "load"}, {"hang", "compile"},
	} {
		t.Run(fault[0]+" at "+fault[1],
			func(t *testing.T) { requireFault(t, fault[0], fault[1], limits) })
	}
}

// requireFault has a fault happen in the one request that comes to its stage.
func requireFault(t *testing.T, kind, stage string, limits compilers.Limits) {
	faulty := newORT(t, compilers.ORTOptions{Limits: limits})
	fault := kind + "@" + stage
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	job := writeJob(t, r, testEP(map[string]string{"fault": fault}), layers(1, 1, false).Encode())
	switch stage {
	case "register", "probe":
		r = compilertest.InstallTestEP(t, r.Directory, compilertest.Release{Fault: fault})
		facts, err := faulty.Probe(t.Context(), r)
		require.NoError(t, err)
		require.NotEmpty(t, facts.EPs[0].Error)
	case "judge":
		r = compilertest.InstallTestEP(t, r.Directory, compilertest.Release{Fault: fault})
		verdicts, err := faulty.Compatibility(t.Context(), r, testEP(nil),
			[]string{"epcachedtest;"})
		if kind == "fail" {
			require.NoError(t, err)
			require.Equal(t, []compilers.Verdict{compilers.Unknown}, verdicts)
			return
		}
		requireKind(t, kind, err)
	case "create", "compile":
		_, err := faulty.Compile(t.Context(), job, nil)
		requireKind(t, kind, err)
	case "load", "run":
		// which does not come to these stages
		result, err := newORT(t, compilers.ORTOptions{}).Compile(t.Context(), job, nil)
		require.NoError(t, err)
		checked, err := faulty.Check(t.Context(),
			compilers.CheckJob{Runtime: r, EPs: job.EPs,
				Graph: filepath.Join(job.Dir, result.Graph), Zeros: 1})
		switch {
		case kind == "hang":
			requireKind(t, kind, err)
		case kind == "fail":
			require.NoError(t, err)
			require.Equal(t, compilers.Failed, checked.Outcome)
			require.Contains(t, checked.Text, "asked to fail")
		default:
			require.NoError(t, err)
			require.Equal(t, compilers.Failed, checked.Outcome)
			require.Equal(t, -1, checked.Code)
		}
	}
}

func requireKind(t *testing.T, kind string, err error) {
	switch kind {
	case "hang":
		require.ErrorIs(t, err, compilers.ErrTimeout)
	case "fail":
		var refused *compilers.RefusedError
		require.ErrorAs(t, err, &refused)
		// ONNX Runtime keeps the text, not every code
		require.Contains(t, refused.Text, "asked to fail")
	default:
		var exit *compilers.ExitError
		require.ErrorAs(t, err, &exit)
	}
}

// A binary that was damaged is refused by its checksum. Without that check it is as most EPs have
// it: what is damaged among the weights loads, and computes something else.
func TestTestEPDamage(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	careless := testEP(map[string]string{"check": "0"})
	const damagedWeights = "weights"
	source := layers(1, 2, false)
	for _, row := range []struct {
		name     string
		damage   func(b []byte) []byte
		careless string
	}{
		{damagedWeights, func(b []byte) []byte {
			at := bytes.Index(b, source.Initializers[0].Raw)
			for i := range width { // the signs of a row, on which every output depends
				b[at+4*i+3] ^= 0x80
			}
			return b
		}, compilers.Passed},
		{"something behind the end", func(b []byte) []byte { return append(b, 0) },
			compilers.Passed},
		{"the last byte missing", func(b []byte) []byte { return b[:len(b)-1] }, compilers.Failed},
		{"half", func(b []byte) []byte { return b[:len(b)/2] }, compilers.Failed},
		{"the beginning", func(b []byte) []byte { b[0] = 'X'; return b }, compilers.Failed},
		{"a later format",
			func(b []byte) []byte { binary.LittleEndian.PutUint32(b[8:], 2); return b },
			compilers.Failed},
		{"empty", func([]byte) []byte { return nil }, compilers.Failed},
	} {
		t.Run(row.name, func(t *testing.T) {
			job := writeJob(t, r, testEP(nil), source.Encode())
			result, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err)
			check := compilers.CheckJob{Runtime: r, EPs: job.EPs,
				Graph: filepath.Join(job.Dir, result.Graph)}
			sound := compilertest.Outputs(t, check, 7)
			path := filepath.Join(job.Dir, result.Files[1])
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path, row.damage(b), 0o600))
			got, err := c.Check(t.Context(), check)
			require.NoError(t, err)
			require.Equal(t, compilers.Failed, got.Outcome)
			require.Equal(t, invalidGraph, got.Code, got.Text)
			check.EPs = []compilers.EP{careless}
			got, err = c.Check(t.Context(), check)
			require.NoError(t, err)
			require.Equal(t, row.careless, got.Outcome, got.Text)
			if row.name == damagedWeights {
				require.NotEqual(t, sound, compilertest.Outputs(t, check, 7))
			}
		})
	}
}

func TestTestEPRefusesMistakes(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	for name, options := range map[string]map[string]string{
		"unknown option": {"nobody": "1"}, "unknown value": {"partition": "3"},
		"unknown fault": {"fault": "burn@compile"}, "not a number": {"delay": "long"},
	} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
			_, err := c.Compile(t.Context(),
				writeJob(t, r, testEP(options), layers(1, 1, false).Encode()), nil)
			var refused *compilers.RefusedError
			require.ErrorAs(t, err, &refused)
			require.Contains(t, refused.Text, "INVALID_ARGUMENT : "+compilertest.TestEP)
		})
	}
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{Verdict: "splendid"})
	verdicts, err := c.Compatibility(t.Context(), r, testEP(nil), []string{"epcachedtest;"})
	require.NoError(t, err)
	require.Equal(t, []compilers.Verdict{compilers.Unknown}, verdicts)
}
