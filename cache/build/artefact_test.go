package build

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
)

// Artefacts of applications have their initializers where they were requested, and leave no node to
// the CPU if the request forbids that.
func TestOutputsOfOthers(t *testing.T) {
	graph := func(nodes int, locations ...string) *epmodel.Model {
		m := &epmodel.Model{Contexts: make([]epmodel.Context, 1), Nodes: nodes}
		for _, l := range locations {
			m.External = append(m.External, epmodel.ExternalFile{Location: l})
		}
		return m
	}
	inFile := &identity.RecordOutput{InitializersFile: "rest.bin"}
	require.NoError(t, SuitsOutput(nil, graph(2)))
	require.ErrorContains(t, SuitsOutput(nil, graph(2, "rest.bin")), `"rest.bin"`)
	require.NoError(t, SuitsOutput(inFile, graph(2, "rest.bin")))
	require.NoError(t, SuitsOutput(inFile, graph(1)), "nothing was left to put there")
	require.ErrorContains(t, SuitsOutput(inFile, graph(2, "rest.bin", "other.bin")), `"other.bin"`)
	require.NoError(t,
		SuitsOutput(&identity.RecordOutput{InitializersInSource: true}, graph(2, "m.data")))

	wish := identity.Record{
		Session: compilers.Session{
			SessionOptions: map[string]string{"session.disable_cpu_ep_fallback": "1"}}}
	require.NoError(t, CheckComplete(&wish, graph(1)))
	require.ErrorContains(t, CheckComplete(&wish, graph(3)), "2 nodes")
	require.NoError(t, CheckComplete(&identity.Record{}, graph(3)))
}
