package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock/wire"
)

func twoEPs() []*wire.RuntimeFacts {
	return []*wire.RuntimeFacts{
		{
			Eps: []*wire.EpFacts{{Name: "A",
				Devices: []*wire.DeviceFacts{{Type: "CPU"}, {Type: "GPU", Error: "no driver"}}}}},
		{Eps: []*wire.EpFacts{{Name: "A", Devices: []*wire.DeviceFacts{{Type: "CPU"}}},
			{Name: "B", Devices: []*wire.DeviceFacts{{Type: "NPU"}}},
			{Name: "C", Error: "does not load", Devices: []*wire.DeviceFacts{{Type: "CPU"}}}}},
	}
}

func TestGetWithoutEPTakesTheOnlyOne(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	model := tinyModel(t, "m.onnx")
	b.set(func() { b.runtimes = twoEPs()[:1] })
	r := call(t, "get", model, "--option", "x=1")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t, "epcachectl: no --ep: A:CPU, which is all that can compile here\n", r.err)
	require.Equal(t, "A", b.first().GetEps()[0].GetName())
	require.Equal(t, "CPU", b.first().GetEps()[0].GetDevices()[0].GetType())
	require.Equal(t, map[string]string{"x": "1"}, b.first().GetEps()[0].GetOptions())

	b.set(func() { b.runtimes = twoEPs() })
	for _, verb := range []string{"get", "why", "warm"} {
		args := []string{verb, model}
		if verb == "why" {
			args = append(args, "--key")
		}
		r = call(t, args...)
		require.Equal(t, exit.BadUsage, r.code)
		require.Equal(t, "epcachectl: "+verb+": no --ep, and several execution providers can "+
			"compile here: A:CPU, B:NPU\nepcachectl: hint: name one, such as --ep A:CPU\n", r.err)
	}
	b.set(func() { b.runtimes = []*wire.RuntimeFacts{{Error: "gone"}} })
	r = call(t, "get", model)
	require.Equal(t, exit.Failed, r.code)
	require.Contains(t, r.err, "no execution provider here can compile")
}
