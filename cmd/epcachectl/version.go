package main

import (
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
)

// versionResult is what version --json prints.
type versionResult struct {
	Version  string `json:"version"`
	Protocol int    `json:"protocol"`
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "print this program's version",
		Long:    "version prints the version of epcachectl and of the protocol that it speaks. The daemon's own is in status." + statusHelp(exitDone, exitUsage),
		Example: "  epcachectl version",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if a.json {
				return a.print.json(versionResult{version, unixsock.Version})
			}
			a.print.line("epcachectl %s (protocol %d)", version, unixsock.Version)
			return nil
		},
	}
}
