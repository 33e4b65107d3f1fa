package doctor

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMisfits(t *testing.T) {
	cases := map[string]struct {
		ep, version, ort string
		bad              bool
	}{
		"OpenVINO 1.8.0 on 1.31.1": {"OpenVINOExecutionProvider", "1.8.0", "1.31.1", true},
		"OpenVINO 1.7.0 on 1.31.1": {"OpenVINOExecutionProvider", "1.7.0", "1.31.1", true},
		"OpenVINO 1.8.0 on 2.0":    {"OpenVINOExecutionProvider", "1.8.0", "2.0.0", true},
		"OpenVINO 1.8.0 on 1.28.0": {"OpenVINOExecutionProvider", "1.8.0", "1.28.0", false},
		"OpenVINO 1.8.1 on 1.31.1": {"OpenVINOExecutionProvider", "1.8.1", "1.31.1", false},
		"OpenVINO 1.4.0 on 1.31.1": {"OpenVINOExecutionProvider", "1.4.0", "1.31.1", false},
		"QNN 2.3.0 on 1.31.1":      {"QNNExecutionProvider", "2.3.0", "1.31.1", true},
		"QNN 2.3.0 on 1.24.4":      {"QNNExecutionProvider", "2.3.0", "1.24.4", false},
		"nothing known of ORT":     {"OpenVINOExecutionProvider", "1.8.0", "", false},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			text, hint := incompatibility(c.ep, c.version, c.ort)
			require.Equal(t, c.bad, text != "", text)
			require.Equal(t, c.bad, hint != "")
		})
	}
}
