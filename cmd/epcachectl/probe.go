package main

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) probeCommand() *cobra.Command {
	var find, refresh bool
	var runtime, library string
	asked := &request{}
	cmd := &cobra.Command{
		Use:   "probe [--find] [--runtime DIR] [--conformance LIBRARY]",
		Short: "print runtimes, execution providers and devices",
		Long: `probe prints which runtimes the daemon has, with their execution providers, the devices that these can compile for, and
their drivers; what is different from the probe before; how changes are noticed; and what keeps the providers' code from doing
harm on this machine. --refresh looks again even if nothing
seems to have changed. --json prints a list of the runtimes; what workers are kept to is in status --json.

--find needs no daemon: it looks for runtimes in well-known places and in Python environments, loads nothing of
them, and prints configuration for epcached --config.

--conformance is for authors of execution providers, and needs no daemon: it holds the plugin LIBRARY to
the guidelines of ONNX Runtime's pages on EPContext models and plugin libraries. Where one does not hold
it tells which call was made, what was expected and what happened. The exit status is 1 where a
guideline is broken that is required.

Every call is made in a worker process (epcached-ort). ONNX Runtime is the one in --runtime DIR, else
the nearest in a folder above LIBRARY that not all users may write. --ep EP[:DEVICE] and
--option K=V say what to try.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl probe
  epcachectl probe --find >> epcached.toml
  epcachectl probe --conformance ./libmy_ep.so --runtime venv --option target=sim`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if library != "" {
				if find || refresh {
					return exit.Usage(errors.New("--conformance goes with --runtime, --ep and --option"))
				}
				return a.conformance(cmd.Context(), library, runtime, asked)
			}
			if len(asked.eps)+len(asked.early)+len(asked.named) > 0 {
				return exit.Usage(errors.New("--ep and --option go with --conformance"))
			}
			if find {
				return a.findRuntimes(cmd.Context(), runtime)
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return a.probe(ctx, c, &wire.Probe{Refresh: refresh}, runtime)
			})
		},
	}
	cmd.Flags().BoolVar(&find, "find", false, "look for runtimes on this machine, and print configuration")
	cmd.Flags().BoolVar(&refresh, "refresh", false, "probe again")
	cmd.Flags().StringVar(&runtime, "runtime", "", "only the runtime in `DIR`")
	cmd.Flags().StringVar(&library, "conformance", "", "hold the plugin `LIBRARY` of an execution provider to ONNX Runtime's guidelines")
	cmd.Flags().Var(cli.Each(asked.addEP, "EP[:DEVICE]"), "ep", "with --conformance: the execution provider's name, if the library has several, and the device")
	cmd.Flags().Var(cli.Each(asked.addOption, "K=V"), "option", "with --conformance: provider option; repeatable")
	return cmd
}

func (a *app) probe(ctx context.Context, c *unixsock.Client, p *wire.Probe, runtime string) error {
	if runtime != "" {
		dir, err := filepath.Abs(runtime)
		if err != nil {
			return err
		}
		p.Runtime = &wire.Runtime{Directory: dir}
	}
	reply, err := c.Probe(ctx, p)
	if err != nil {
		return err
	}
	if a.JSON {
		return a.Print.JSON(jsonout.List(reply.GetRuntimes()))
	}
	if runtime == "" {
		printSandbox(a.Print, reply.GetSandbox())
	}
	for _, r := range reply.GetRuntimes() {
		printRuntime(a.Print, r)
	}
	if status, err := c.Status(ctx); err == nil && sourcelessLine(status.GetSourceless()) != "" {
		a.Print.Hint(sourcelessLine(status.GetSourceless()))
	}
	if len(reply.GetRuntimes()) == 0 {
		a.Print.Hint("the daemon has no runtime; find some with: epcachectl probe --find")
	}
	return nil
}
