package main

import (
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
)

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "print this program's version",
		Long:    "version prints the version of epcachectl and of the protocol that it speaks. The daemon's own is in status." + statusHelp(exitDone, exitUsage),
		Example: "  epcachectl version",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if a.json {
				return a.print.json(object{"version": version, "protocol": unixsock.Version})
			}
			a.print.line("epcachectl %s (protocol %d)", version, unixsock.Version)
			return nil
		},
	}
}
