package main

import (
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
)

func newInspect(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect FILE",
		Short: "print the contents of an ONNX file",
		Long: `inspect reads any ONNX file without a daemon and without loading it: versions,
metadata, EPContext nodes with all attributes, and the files that it refers to. Faults that keep a
compiled model from loading are printed as its problem, and give exit status 4.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage,
				exit.NotAllowed),
		Example: "  epcachectl inspect mobilenet_ctx.onnx",
		Args:    cli.UsageArgs(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			out, err := modelfile.Inspect(cmd.Context(), args[0])
			if err != nil {
				return exit.WithOperation("inspect", args[0], err)
			}
			if a.JSON {
				err = a.Print.JSON(out)
			} else {
				a.Print.Table(out.Rows())
			}
			if err == nil && out.Problem != "" {
				return exit.Status(exit.Damage)
			}
			return err
		},
	}
}
