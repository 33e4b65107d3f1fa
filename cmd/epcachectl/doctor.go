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
		Short: "find what is wrong on this machine, and say what to do",
		Long: `doctor looks for what keeps epcached from being of use: first from this side (is there a socket, may the caller connect, does
a daemon answer in time, do the versions fit), then it asks the daemon what it sees (runtimes, disk, clock, rights, watching),
and then it looks at an application's side: --runtime DIR names the runtime that the application loads, --python PATH its
Python. With --python that program is run, imports onnxruntime and starts its plugin execution providers, each in a process of
its own, with the caller's rights and environment: just as the application would.

Each finding says what is wrong, why it matters, and what to do. Without a daemon doctor prints what it can see. Warnings do
not count as failure.` + exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon) + `
Failed means that there are problems. Where no daemon answers, and the next program starts one, that is no problem.`,
		Example: `  epcachectl doctor
  epcachectl doctor --python .venv/bin/python`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.Within(cmd.Context())
			defer cancel()
			return doctor.Examine(ctx, a, runtime, python)
		},
	}
	cmd.Flags().StringVar(&runtime, "runtime", "", "also look at the runtime in `DIR`, which an application loads")
	cmd.Flags().StringVar(&python, "python", "", "also look at the Python at `PATH`, which an application runs in")
	return cmd
}
