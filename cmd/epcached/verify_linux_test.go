package main

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/unixsock/wire"
)

// Real builds are compared with their models: as they are made, and later.
func TestRealOutputIsVerified(t *testing.T) {
	t.Parallel()
	for name, real := range realProviders {
		t.Run(name, func(t *testing.T) {
			d := newSite(t, runtimeDir(t, real.runtime)).start(t)
			c := d.dial()
			verify := func(r *wire.Acquire) { r.VerifyOutput = 0.01 }
			first := writeModel(t, t.TempDir(), 1)
			a := get(t, c, first, withEPs(real.provider), verify)
			require.Equal(t, "compiled", a.Outcome)
			require.Empty(t, a.Warnings)
			builds := d.list()
			require.Len(t, builds, 1)
			require.Equal(t, 0.01, builds[0].VerifiedOutput)

			second := writeModel(t, t.TempDir(), 2)
			get(t, c, second, withEPs(real.provider))
			again := get(t, c, second, withEPs(real.provider), verify)
			require.Equal(t, "hit", again.Outcome)
			require.Empty(t, again.Warnings, "it was compared")
		})
	}
}

// endless is Dense, and behind it a loop that runs for centuries.
func endless() []byte {
	m := compilertest.DenseModel(7, 16, 1)
	state := m.Outputs[0]
	flag, count := tinymodel.Value{Name: "on", Type: 9}, tinymodel.Value{Name: "i", Type: 7}
	in, out, on := state, state, flag
	in.Name, out.Name, on.Name = "in", "out", "still"
	m.Initializers = append(m.Initializers,
		tinymodel.Tensor{Name: "always", Type: 9, Raw: []byte{1}},
		tinymodel.Tensor{Name: "times", Type: 7,
			Raw: binary.LittleEndian.AppendUint64(nil, math.MaxInt64)})
	m.Nodes = append(m.Nodes,
		tinymodel.Node{Op: "Loop", Inputs: []string{"times", "always", state.Name},
			Outputs: []string{"end"}, Attributes: map[string]any{"body": tinymodel.Model{
				Nodes: []tinymodel.Node{{Op: "Identity", Inputs: []string{flag.Name},
					Outputs: []string{on.Name}},
					{Op: "Sin", Inputs: []string{in.Name}, Outputs: []string{out.Name}}},
				Inputs: []tinymodel.Value{count, flag, in}, Outputs: []tinymodel.Value{on, out}}}})
	m.Outputs = []tinymodel.Value{{Name: "end", Type: state.Type, Shape: state.Shape}}
	return m.Encode()
}

// A model that never ends holds a slot for the limit of comparisons alone, and is served as not
// verified.
func TestEndlessModelIsServedAsNotVerified(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	s.config += "[limits]\nwall = \"10s\"\n"
	d := s.start(t)
	path := filepath.Join(t.TempDir(), "endless.onnx")
	require.NoError(t, os.WriteFile(path, endless(), 0o644))
	verify := func(r *wire.Acquire) { r.VerifyOutput = 0.01 }
	a := get(t, d.dial(), path, verify)
	require.Equal(t, "compiled", a.Outcome)
	require.Len(t, a.Warnings, 1)
	require.Contains(t, a.Warnings[0], "output not verified, cannot be tested here: it reached a "+
		"limit of [limits]: ")
	require.Contains(t, a.Warnings[0], "time limit reached: 10s")
	require.Equal(t, "hit", get(t, d.dial(), path, verify).Outcome,
		"and not compared again at once")
	require.Zero(t, d.list()[0].VerifiedOutput)
}
