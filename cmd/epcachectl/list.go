package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newList(a *cli.Call) *cobra.Command {
	var filter wire.List
	cmd := &cobra.Command{
		Use:   "list [--model MODEL] [--ep EP]",
		Short: "list stored builds",
		Long: `list prints a line for each build that the caller may see: key, model, execution
provider with its version and SDK, compatibility with this machine, size, hits, how many times
faster it loads than its source, how it is kept, and state.

A weight-sharing group is one build: its first model is named, with the number of others. --json
prints a list of objects.` + exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed),
		Example: "  epcachectl list --ep OpenVINOExecutionProvider",
		Args:    cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(cmd.Context(), a, &filter)
		},
	}
	cmd.Flags().StringVar(&filter.Model, "model", "", "only of the `MODEL` with this name or digest prefix")
	cmd.Flags().StringVar(&filter.Ep, "ep", "", "only of this execution `PROVIDER`")
	return cmd
}

// list prints page after page. Where the daemon goes away in between, the next one is asked for the rest.
func list(ctx context.Context, a *cli.Call, filter *wire.List) error {
	array, table, listed := term.NewArray(a.Print, ""), term.NewColumns(a.Print), 0
	err := a.WithProgress(func(progress func(*wire.Progress)) error {
		return a.WithReader(ctx, func(ctx context.Context, c *unixsock.Client) error {
			return c.ListPages(ctx, filter, progress, func(page []*wire.Build) error {
				first := listed == 0
				listed += len(page)
				if a.JSON {
					return array.Add(jsonout.List(page)...)
				}
				return table.Print(buildRows(page, first))
			})
		})
	})
	switch {
	case err != nil:
		return err
	case a.JSON:
		return errors.Join(array.End(), a.Print.Result([]byte("\n")))
	case listed == 0:
		a.Print.Note(nothingListed(filter))
	}
	return nil
}

func nothingListed(filter *wire.List) string {
	text := "no builds"
	if filter.GetModel() != "" {
		text += fmt.Sprintf(" of model %q", term.Brief(filter.GetModel()))
	}
	if filter.GetEp() != "" {
		text += fmt.Sprintf(" for %q", term.Brief(filter.GetEp()))
	}
	return text
}

// buildRows are rows of a table of builds, none where there are no builds; the first ones have a head.
func buildRows(builds []*wire.Build, first bool) (rows [][]string) {
	if len(builds) == 0 {
		return nil
	}
	if first {
		rows = [][]string{{"BUILD", "MODEL", "EP", "VERSION", "SDK", "FITS", "SIZE", "HITS", "LAST USED", "GAIN", "KEPT", "STATE"}}
	}
	for _, b := range builds {
		state := term.TextOrDash(b.GetState())
		if b.GetPinned() {
			state += ", pinned"
		}
		rows = append(rows, []string{
			term.Short(b.GetBuild()), modelColumn(b), term.TextOrDash(b.GetEp()), term.TextOrDash(b.GetEpVersion()),
			term.TextOrDash(b.GetSdkVersion()), cmp.Or(verdict(b.GetCompatibility()), "-"), term.Bytes(sizeOf(b)),
			fmt.Sprint(b.GetHits()), term.Time(b.GetLastUsedMs()), gainColumn(b), term.TextOrDash(b.GetKeptAs()), state,
		})
	}
	return rows
}

func modelColumn(b *wire.Build) string {
	if n := len(b.GetMembers()); n > 1 {
		return fmt.Sprintf("%s +%d", term.TextOrDash(b.GetModelName()), n-1)
	}
	return term.TextOrDash(b.GetModelName())
}
