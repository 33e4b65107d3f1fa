package rules

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
)

func TestEveryDescribedEPHasRules(t *testing.T) {
	set, err := readShipped()
	require.NoError(t, err)
	for _, ep := range []string{"QNNExecutionProvider", "OpenVINOExecutionProvider",
		"TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider", "VitisAIExecutionProvider",
		"MIGraphXExecutionProvider", "CoreMLExecutionProvider"} {
		_, known := compilers.EPByName(ep)
		require.True(t, known, ep)
		require.Contains(t, set.EPs(), ep)
		require.NotEmpty(t, set.eps[ep].parts[0].rules, ep)
	}
}
