package main

import (
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/unixsock"
)

func newVersion(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "print this program's version",
		Long:    "version prints the version of epcachectl and of the protocol that it speaks. The daemon's own is in status." + exit.Help(exit.Done, exit.BadUsage),
		Example: "  epcachectl version",
		Args:    cli.UsageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if a.JSON {
				return a.Print.JSON(jsonout.Object{"version": a.Version, "protocol": unixsock.Version})
			}
			a.Print.Line("epcachectl %s (protocol %d)", a.Version, unixsock.Version)
			return nil
		},
	}
}
