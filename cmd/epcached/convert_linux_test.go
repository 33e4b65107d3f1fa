package main

import (
	"bytes"
	"io"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/unixsock/wire"
)

// contextOf returns the context binary of an artefact of one, wherever it stands.
func (a lease) contextOf(t *testing.T) []byte {
	graph := a.graphOf(t)
	m, err := epmodel.Read(limited(t), a.Graph, bytes.NewReader(graph))
	require.NoError(t, err)
	for _, name := range m.ContextFiles() {
		return contentOf(t, filepath.Join(a.View, filepath.Dir(a.Graph), name))
	}
	require.NotEmpty(t, m.Contexts)
	b, err := io.ReadAll(m.Contexts[0].Open(bytes.NewReader(graph)))
	require.NoError(t, err)
	require.NotEmpty(t, b)
	return b
}

// Real execution providers load what a conversion makes of what they made, in both directions.
func TestRealArtefactsAreConverted(t *testing.T) {
	t.Parallel()
	for name, real := range realProviders {
		for direction, embed := range map[string]bool{"into the graph": true,
			"out of the graph": false} {
			t.Run(name+" "+direction, func(t *testing.T) {
				d := newSite(t, runtimeDir(t, real.runtime)).start(t)
				c := d.dial()
				model := writeModel(t, t.TempDir(), 1)
				form := func(embed bool) func(
					*wire.Acquire) {
					return func(r *wire.Acquire) { r.Embed = embed }
				}
				made := get(t, c, model, withEPs(real.provider), form(!embed))
				require.Equal(t, "compiled", made.Outcome)
				a := get(t, c, model, withEPs(real.provider), form(embed))
				require.Equal(t, "hit", a.Outcome, a.Why)
				require.Contains(t, a.Why, "converted from the ")
				require.Contains(t, a.CompatibilityReason, "converted from the ")
				require.Equal(t, map[bool]int{true: 1, false: 2}[embed], len(a.Files))
				require.True(t, bytes.Equal(made.contextOf(t), a.contextOf(t)),
					"the context's bytes")
				a.requireRight(t)
				for _, b := range d.list() {
					require.Equal(t, "passed", b.LoadCheck)
				}
				require.EqualValues(t, 1, d.status().Compiles)
			})
		}
	}
}
