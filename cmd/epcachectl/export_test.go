package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestExportedBuildsAreListedInColumns(t *testing.T) {
	var builds []exported
	for _, name := range []string{"tiny.onnx", "much-longer.onnx"} {
		card := &portable.Card{Config: &portable.Config{Files: []portable.File{{Size: 2048}}}}
		builds = append(builds, exported{card: card,
			build: &wire.Build{Build: "cdcdcdcdcdcd", ModelName: name, Ep: "QNN"}})
	}
	const table = "BUILD         MODEL             EP   SIZE\n" +
		"cdcdcdcdcdcd  tiny.onnx         QNN  2.0 KiB\n" +
		"cdcdcdcdcdcd  much-longer.onnx  QNN  2.0 KiB\n"
	for to, stream := range map[string]int{"x.tar": 0, "-": 1} {
		streams := make([]bytes.Buffer, 2)
		e := &export{Call: &cli.Call{Print: term.NewPrinter(&streams[0], &streams[1])}, to: to,
			signer: &portable.Signer{}}
		require.NoError(t, e.report(builds))
		require.Equal(t, table+"exported 2 builds, 4.0 KiB, to "+to+"\n", streams[stream].String())
		require.Empty(t, streams[1-stream].String())
	}
}
