package main

import (
	"context"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) probeCommand() *cobra.Command {
	var find, refresh bool
	var runtime string
	cmd := &cobra.Command{
		Use:   "probe [--find] [--runtime DIR]",
		Short: "print runtimes, execution providers and devices",
		Long: `probe prints which runtimes the daemon has, with their execution providers, the devices that these can compile for, and
their drivers; what is different from the probe before; how changes are noticed; and what keeps the providers' code from doing
harm on this machine. --refresh looks again even if nothing
seems to have changed. --json prints a list of the runtimes; what workers are kept to is in status --json.

--find needs no daemon: it looks for runtimes in well-known places and in Python environments, loads nothing of
them, and prints configuration for epcached --config.` + statusHelp(askingCodes...),
		Example: `  epcachectl probe
  epcachectl probe --find >> epcached.toml`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if find {
				return a.findRuntimes(cmd.Context(), runtime)
			}
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return a.probe(ctx, c, &wire.Probe{Refresh: refresh}, runtime)
			})
		},
	}
	cmd.Flags().BoolVar(&find, "find", false, "look for runtimes on this machine, and print configuration")
	cmd.Flags().BoolVar(&refresh, "refresh", false, "probe again")
	cmd.Flags().StringVar(&runtime, "runtime", "", "only the runtime in `DIR`")
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
	if a.json {
		return a.print.json(runtimesOf(reply.GetRuntimes()))
	}
	if runtime == "" {
		a.print.sandbox(reply.GetSandbox())
	}
	for _, r := range reply.GetRuntimes() {
		a.print.runtime(r)
	}
	if len(reply.GetRuntimes()) == 0 {
		a.print.hint("the daemon has no runtime; find some with: epcachectl probe --find")
	}
	return nil
}
