package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) listCommand() *cobra.Command {
	var filter wire.List
	cmd := &cobra.Command{
		Use:   "list [--model MODEL] [--ep EP]",
		Short: "list what is kept",
		Long: `list prints one line for each build that the daemon keeps and the caller may see: its key, the model's name,
the execution provider with its version and SDK, what it is good for on this machine, size, hits, how many times faster than
its source it loads, and state, with whether it is pinned. A weight-sharing group is one build: its first model is named, with the number of the others. --json prints a list of objects.` + statusHelp(exitDone, exitFailed, exitUsage, exitNoDaemon, exitNotAllowed),
		Example: "  epcachectl list --ep OpenVINOExecutionProvider",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				builds, err := c.ListAll(ctx, &filter)
				if err != nil {
					return err
				}
				if a.json {
					return a.print.json(buildsOf(builds))
				}
				return a.print.builds(builds)
			})
		},
	}
	cmd.Flags().StringVar(&filter.Model, "model", "", "only of the `MODEL` with this name or digest prefix")
	cmd.Flags().StringVar(&filter.Ep, "ep", "", "only of this execution `PROVIDER`")
	return cmd
}

// builds prints a table; nothing where there are none.
func (p *printer) builds(builds []*wire.Build) error {
	if len(builds) == 0 {
		return nil
	}
	rows := [][]string{{"BUILD", "MODEL", "EP", "VERSION", "SDK", "FITS", "SIZE", "HITS", "LAST USED", "GAIN", "STATE"}}
	for _, b := range builds {
		rows = append(rows, []string{
			short(b.GetBuild()), modelColumn(b), orDash(b.GetEp()), orDash(b.GetEpVersion()), orDash(b.GetSdkVersion()), fits(b), byteSize(sizeOf(b)),
			strconv.FormatUint(b.GetHits(), 10), timeOf(b.GetLastUsedMs()), gainColumn(b), stateColumn(b),
		})
	}
	return p.table(rows)
}

// modelColumn names the model, and says how many others are in its group.
func modelColumn(b *wire.Build) string {
	if n := len(b.GetMembers()); n > 1 {
		return fmt.Sprintf("%s +%d", orDash(b.GetModelName()), n-1)
	}
	return orDash(b.GetModelName())
}

func stateColumn(b *wire.Build) string {
	if b.GetPinned() {
		return orDash(b.GetState()) + ", pinned"
	}
	return orDash(b.GetState())
}

func fits(b *wire.Build) string {
	if b.GetCompatibility() == "" {
		return "-"
	}
	return verdict(b.GetCompatibility())
}
