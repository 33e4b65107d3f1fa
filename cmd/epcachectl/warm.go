package main

import (
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

func newWarm(a *cli.Call) *cobra.Command {
	g := &acquire.Get{Call: a, Verb: "warm", OnMiss: "background"}
	var follow bool
	var file string
	cmd := &cobra.Command{
		Use:   "warm [MODEL|DIR...] [--pipeline FILE] [--ep EP[:DEVICE]...] [flags]",
		Short: "compile models in the background",
		Long: `warm requests the compiled form of each MODEL, and of each *.onnx file below DIR,
and does not wait. It is for installers. Misses are compiled in the background after interactive
requests, also when this program has ended or the daemon restarts. If the queue is full, warm
waits. epcachectl jobs lists the jobs.

--pipeline FILE gives each model its own execution providers, options and dimensions, and can form
weight-sharing groups (see the example). Flags apply where FILE says nothing, and to models in DIR
that FILE does not list.

--follow waits for all of them, shows progress, and prints each result; interrupting it cancels
nothing. The flags are those of get. With -n it prints what would be compiled.` +
			exit.Help(exit.WaitingCodes...) + `

Status 0 means that every build exists or is queued; with --follow, that it exists.`,
		Example: `  epcachectl warm models/ --ep OpenVINOExecutionProvider:CPU
  epcachectl warm det.onnx rec.onnx --ep QNNExecutionProvider --option soc_model=60 --follow
  epcachectl warm models/ --pipeline models/pipeline.toml --follow

  # models/pipeline.toml
  ep = ["OpenVINOExecutionProvider:CPU"]    # for all that do not name their own
  [[model]]
  path = "det.onnx"                         # relative to this file
  dims = { height = 640, width = 640 }
  [[model]]
  path = "rec.onnx"
  ep = ["QNNExecutionProvider"]
  options = { soc_model = 60 }
  [[group]]
  models = ["prefill.onnx", "decode.onnx"]`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.Warm(cmd.Context(), args, file, follow)
		},
	}
	g.Request.AddFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&file, "pipeline", "", "`FILE` that lists models and their options")
	f.BoolVarP(&follow, "follow", "f", false, "wait for all models, and show progress")
	f.BoolVarP(&g.DryRun, "dry-run", "n", false, "compile nothing, print what would be compiled")
	f.BoolVar(&g.Progress, "progress", false,
		"print each phase on a line of its own to standard error")
	return cmd
}
