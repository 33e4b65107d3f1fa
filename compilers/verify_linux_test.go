package compilers_test

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

// shifted adds a constant: unlike Dense it is not zero on zeros.
func shifted(by float32) []byte {
	return tinymodel.Model{
		Nodes: []tinymodel.Node{{Op: "Add", Inputs: []string{"x", "c"},
			Outputs: []string{"y"}}},
		Initializers: []tinymodel.Tensor{{Name: "c", Type: 1, Shape: []int64{4},
			Raw: floats32(by, by, by, by)}},
		Inputs:  []tinymodel.Value{{Name: "x", Type: 1, Shape: []any{1, 4}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: 1, Shape: []any{1, 4}}},
	}.Encode()
}

func floats32(values ...float32) (b []byte) {
	for _, v := range values {
		bits := math.Float32bits(v)
		b = append(b, byte(bits), byte(bits>>8), byte(bits>>16), byte(bits>>24))
	}
	return b
}

// Builds of real execution providers are compared with their source models, and with others.
func TestVerifyOutput(t *testing.T) {
	for name, real := range map[string]struct {
		runtime string
		ep      compilers.EP
	}{
		"OpenVINO": {"openvino-1.8.1",
			compilers.EP{Name: openVINO, Devices: []compilers.Device{{Type: "cpu"}}, Options: f32}},
		"QNN": {"qnn-2.7.0",
			compilers.EP{Name: qnn,
				Options: map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}}},
	} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.Runtime(t, real.runtime)
			c := newORT(t, compilers.ORTOptions{})
			job := writeJob(t, r, real.ep, shifted(0.5))
			made, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err)
			verify := func(source []byte, most float64) compilers.VerifyResult {
				path := filepath.Join(t.TempDir(), "source.onnx")
				require.NoError(t, os.WriteFile(path, source, 0o600))
				v := compilers.VerifyJob{CheckJob: compilers.CheckJob{Runtime: r, EPs: job.EPs,
					Graph: filepath.Join(job.Dir, made.Graph)}, Source: path, Most: most}
				result, err := c.VerifyOutput(t.Context(), v)
				require.NoError(t, err)
				return result
			}
			same := verify(shifted(0.5), 0.01)
			require.Equal(t, compilers.Passed, same.Outcome, same.Text)
			require.Equal(t, 1, same.Outputs)
			require.Positive(t, same.CPUSeconds)
			other := verify(shifted(0.75), 0.01)
			require.Equal(t, compilers.Failed, other.Outcome)
			require.Contains(t, other.Text, `output "y" of shape [1 4]: value 0 is 0.5`)
			require.Contains(t, other.Text, "and 0.75 in the source model")
			require.Equal(t, compilers.Passed, verify(shifted(0.75), 0.3).Outcome)
			require.Equal(t, compilers.NotCheckable, verify([]byte("not a model"), 0.01).Outcome)
			require.NoError(t, os.Remove(filepath.Join(job.Dir, made.Files[1])))
			without := verify(shifted(0.5), 0.01)
			require.NotEqual(t, compilers.Passed, without.Outcome)
			require.NotEmpty(t, without.Text)
		})
	}
}

func TestVerifyOutputWantsATolerance(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	for _, most := range []float64{0, -1, math.NaN(), math.Inf(1)} {
		_, err := c.VerifyOutput(t.Context(), compilers.VerifyJob{Source: "/x", Most: most})
		require.ErrorContains(t, err, "tolerance")
	}
}
