//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// ONNX Runtime loads and runs each of the tiny models.
func TestProbeModelsRun(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	for _, version := range []string{oldestORT, newestORT} {
		r := compilertest.TestEPRuntime(t, version, compilertest.Release{Ops: "none"})
		for i, m := range tinymodel.Probes() {
			job := writeJob(t, r, testEP(nil), m.Encode())
			result, err := c.Check(t.Context(),
				compilers.CheckJob{Runtime: r, EPs: job.EPs, Graph: job.Model, Zeros: 1})
			require.NoError(t, err, i)
			require.Equal(t, compilers.Passed, result.Outcome, "%d: %s", i, result.Text)
			require.True(t, result.Ran)
		}
	}
}

// Real EPs take nodes of the graph that has all tiny models in it, so that it says what it should.
func TestProbeModelsOfRealEPs(t *testing.T) {
	for runtime, ep := range map[string]compilers.EP{
		"openvino-1.8.1": {Name: "OpenVINOExecutionProvider"},
		"qnn-2.7.0": {Name: "QNNExecutionProvider",
			Options: map[string]string{"soc_model": "60"}},
	} {
		t.Run(runtime, func(t *testing.T) {
			r := compilertest.Runtime(t, runtime)
			_, err := newORT(t, compilers.ORTOptions{}).Compile(t.Context(), writeJob(t, r, ep,
				tinymodel.Probes()[1].Encode()), nil)
			require.NoError(t, err)
		})
	}
}

func TestFingerprintOfAnEPThatTakesOneOperator(t *testing.T) {
	for _, op := range []string{"Relu", "Mul", "Add", "MatMul"} {
		t.Run(op, func(t *testing.T) {
			c := newORT(t, compilers.ORTOptions{})
			r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{Ops: op,
				Single: true, SDK: "1.2.3"})
			prints, err := c.Fingerprint(t.Context(), r, []compilers.EP{testEP(nil)}, nil)
			require.NoError(t, err)
			require.Equal(t, "1.2.3", prints[0].SDKVersion)
			control, err := compilers.Control(t.Context(), c, r, []compilers.EP{testEP(nil)},
				t.TempDir(), nil)
			require.NoError(t, err)
			require.Equal(t, compilers.Passed, control.Outcome)
		})
	}
}

func TestFingerprintWithTheRequestsOwnModel(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{Least: 2 * width,
		SDK: "1.2.3"})
	eps := []compilers.EP{testEP(map[string]string{"target": "sim-2"})}
	_, err := c.Fingerprint(t.Context(), r, eps, nil)
	require.ErrorAs(t, err, new(*compilers.NoNodesError))
	own := writeJob(t, r, testEP(nil), layers(1, 1, false).Encode())
	prints, err := c.Fingerprint(t.Context(), r, eps, &own)
	require.NoError(t, err)
	require.Equal(t, []string{"1.2.3", "sim-2"}, []string{prints[0].SDKVersion,
		prints[0].HardwareArchitecture})
	control, err := compilers.Control(t.Context(), c, r, eps, t.TempDir(), &own)
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, control.Outcome)
}

// moody compiles the tiny models of its list, and no others.
type moody struct {
	compilers.Compiler
	takes  func(model []byte) error
	models int
}

func (m *moody) Compile(_ context.Context, job compilers.Job, _ func(string)) (compilers.Result,
	error) {
	m.models++
	model, err := os.ReadFile(job.Model)
	if err == nil {
		err = m.takes(model)
	}
	return compilers.Result{Graph: filepath.Base(job.Model)}, err
}

func (m *moody) Check(context.Context, compilers.CheckJob) (compilers.CheckResult, error) {
	return compilers.CheckResult{Outcome: compilers.Passed}, nil
}

func TestHowManyTinyModelsAreTried(t *testing.T) {
	probes := tinymodel.Probes()
	refused := func(model []byte) error {
		return &compilers.RefusedError{Doing: "compile", Code: 11, Text: fmt.Sprint("a model of ",
			len(model))}
	}
	for name, row := range map[string]struct {
		takes  func(model []byte) error
		models int
		fails  bool
	}{
		"all": {func([]byte) error { return nil }, 1, false},
		"nothing": {func([]byte) error { return &compilers.NoNodesError{} }, 2,
			true},
		"refused in the same words": {
			func([]byte) error {
				return &compilers.RefusedError{Doing: "compile", Code: 11,
					Text: "bad option"}
			}, 2, true},
		"refused before it compiles": {func([]byte) error {
			return &compilers.RefusedError{Doing: "register X", Code: 1, Text: "cannot open"}
		}, 1, true},
		"crashes": {func([]byte) error { return &compilers.ExitError{} }, 1, true},
		"only one node at a time, of one type": {func(model []byte) error {
			if string(model) == string(probes[len(probes)-1].Encode()) {
				return nil
			}
			return refused(model)
		}, len(probes), false},
		"refuses each for another reason": {refused, len(probes), true},
		"another error": {func([]byte) error { return errors.New("no") }, 1,
			true},
	} {
		t.Run(name, func(t *testing.T) {
			c := &moody{takes: row.takes}
			_, err := compilers.Control(t.Context(), c, compilers.Runtime{},
				[]compilers.EP{{Name: "X"}}, t.TempDir(), nil)
			require.Equal(t, row.fails, err != nil)
			require.Equal(t, row.models, c.models)
		})
	}
}

// An EP that makes no EPContext nodes is known after one compile, in ONNX Runtime's words.
func TestAnEPWithoutCompiledModelsIsKnown(t *testing.T) {
	c := &moody{takes: func([]byte) error {
		return &compilers.RefusedError{Doing: "compile", Code: 1,
			Text: "ConvertEpContextNodes X: OrtEp::Compile() returned a NULL EPContext node."}
	}}
	_, err := compilers.Control(t.Context(), c, compilers.Runtime{},
		[]compilers.EP{{Name: "X"}}, t.TempDir(), nil)
	require.ErrorIs(t, err, compilers.ErrNoContexts)
	require.Equal(t, 1, c.models)
}
