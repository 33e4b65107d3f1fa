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
		Short: "have models compiled in the background",
		Long: `warm asks for the compiled form of each MODEL, and of each *.onnx file in DIR and the folders below it that are not hidden, and does not
wait: what is not there is compiled in the background, after what somebody waits for. It is what an installer calls. The
compiles go on when this program has ended, and after a restart of a daemon of your own, which finds the files again; epcachectl jobs shows them. Where the daemon takes no more at once, it waits for room.

With --pipeline FILE, a TOML file as in the examples, each model has execution providers, options
and dimensions of its own, and models can be a weight-sharing group. The flags hold where FILE says
nothing. Models in a DIR that FILE does not list are compiled as the flags say.

With --follow it waits for all of them, shows how far they are, and prints how each ended. To interrupt it ends none of
them. The flags are those of get. With -n nothing is compiled; it prints what would be.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.NoDaemon, exit.NotAllowed, exit.Interrupt) + `
Done means that all are there or queued, with --follow that all are there.`,
		Example: `  epcachectl warm models/ --ep OpenVINOExecutionProvider:CPU
  epcachectl warm det.onnx rec.onnx --ep QNNExecutionProvider --option soc_model=60 --follow
  epcachectl warm models/ --pipeline models/pipeline.toml --follow

  # models/pipeline.toml
  ep = ["OpenVINOExecutionProvider:CPU"]    # for all that do not name their own
  [[model]]
  path = "det.onnx"                         # from the file's folder on
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
	f.StringVar(&file, "pipeline", "", "`FILE` that lists models, and what each is compiled with")
	f.BoolVarP(&follow, "follow", "f", false, "wait for all of them, and show how far they are")
	f.BoolVarP(&g.DryRun, "dry-run", "n", false, "compile nothing, print what would be")
	f.BoolVar(&g.Progress, "progress", false, "print each phase on a line of its own to standard error")
	return cmd
}
