package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
)

func TestRunHandsDevicesOnWithTheirIds(t *testing.T) {
	r := &runCall{Call: &cli.Call{}}
	require.NoError(t, r.request.AddEP("A:NPU,vendor=0x8086,device=0x643e,is_virtual=1"))
	settings, err := r.settings()
	require.NoError(t, err)
	text, err := json.Marshal(settings)
	require.NoError(t, err)
	require.Equal(t,
		`{"eps":[{"name":"A","devices":[{"type":"NPU","vendor_id":32902,"device_id":25662,`+
			`"metadata":{"is_virtual":"1"}}]}],"on_miss":""}`, string(text))
}
