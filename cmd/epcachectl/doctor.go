package main

import (
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/doctor"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

func newDoctor(a *cli.Call) *cobra.Command {
	var runtime, python string
	cmd := &cobra.Command{
		Use:   "doctor [--runtime DIR] [--python PATH]",
		Short: "find faults of this machine and remedies",
		Long: `doctor looks for faults from three sides: the connection (socket, rights, versions),
the daemon (runtimes, disk, clock, rights, watching) and, with --runtime or --python, an
application.

With --python it runs python -m epcache doctor in that Python, with the caller's rights and
environment. That imports onnxruntime and starts each plugin execution provider in its own process.

Each finding says what is wrong, why it matters and what to do. Warnings do not count as failure.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon) + `

Status 1 means that there are problems. A daemon that the next program will start is no problem.`,
		Example: `  epcachectl doctor
  epcachectl doctor --python .venv/bin/python`,
		Args: cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.WithDeadline(cmd.Context())
			defer cancel()
			return doctor.Examine(ctx, a, runtime, python)
		},
	}
	cmd.Flags().StringVar(&runtime, "runtime", "",
		"also check the runtime in `DIR` that an application loads")
	cmd.Flags().StringVar(&python, "python", "",
		"also check the Python at `PATH` that an application runs in")
	return cmd
}
