package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"
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
	var long bool
	cmd := &cobra.Command{
		Use:   "list [--model MODEL] [--ep EP] [-l]",
		Short: "list stored builds",
		Long: `list prints a line for each build that the caller may see: key, model, execution
provider with its version and SDK, compatibility with this machine, size, hits, how many times
faster it loads than its source, how it is kept, and state.

A weight-sharing group is one build: its first model is named, with the number of others. --json
prints a list of objects.

On a terminal the builds used last come first, below a line with what all have in common.
-l prints every column, and the paths of models that the caller may know.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed),
		Example: "  epcachectl list --ep OpenVINOExecutionProvider",
		Args:    cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(cmd.Context(), a, &filter, long)
		},
	}
	cmd.Flags().StringVar(&filter.Model, "model", "",
		"only builds of the `MODEL` with this name or digest prefix")
	cmd.Flags().StringVar(&filter.Ep, "ep", "", "only builds of this execution `PROVIDER`")
	cmd.Flags().BoolVarP(&long, "long", "l", false, "print all columns, and paths of models")
	return cmd
}

// list prints page after page; on a terminal it prints all at the end, in the order of use. If the
// daemon restarts in between, it continues with the new one.
func list(ctx context.Context, a *cli.Call, filter *wire.List, long bool) error {
	array, listed := term.NewArray(a.Print, ""), 0
	optional := []string{"GAIN", "KEPT", "FITS", "HITS", "VERSION", "SDK", "LAST USED", "STATE"}
	if long && a.Print.Width >= 100 {
		optional = nil
	}
	table := term.NewColumns(a.Print, optional...)
	var all []*wire.Build // for a terminal
	err := a.WithProgress(func(progress func(*wire.Progress)) error {
		return a.WithReader(ctx, func(ctx context.Context, c *unixsock.Client) error {
			return c.ListPages(ctx, filter, progress, func(page []*wire.Build) error {
				first := listed == 0
				listed += len(page)
				if a.JSON {
					return array.Add(jsonout.List(page)...)
				}
				if a.Print.Width > 0 {
					all = append(all, page...)
					return nil
				}
				return table.Print(buildRows(a.Print, page, first, long))
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
	case len(all) > 0:
		slices.SortStableFunc(all, func(x, y *wire.Build) int {
			return cmp.Compare(lastUse(y), lastUse(x))
		})
		rows := buildRows(a.Print, all, true, long)
		if !long {
			rows = withoutCommon(a.Print, rows)
		}
		err := table.Print(rows)
		if left := table.Dropped(rows[0]); long && err == nil && len(left) > 0 {
			a.Print.Note("the terminal is too narrow for the columns " + strings.Join(left, ", ") +
				"; list | cat prints them")
		}
		return err
	}
	return nil
}

func lastUse(b *wire.Build) int64 { return max(b.GetLastUsedMs(), b.GetCreatedMs()) }

// withoutCommon prints the columns that are equal in all rows as a heading, and returns the rows
// without them. It keeps the columns for sizes and uses, because equal values are a coincidence
// there.
func withoutCommon(p *term.Printer, rows [][]string) [][]string {
	var common []string
	for i := len(rows[0]) - 1; i >= 0; i-- {
		head := rows[0][i]
		if len(rows) < 3 || !slices.Contains([]string{"EP", "VERSION", "SDK", "FITS", "GAIN",
			"KEPT", "STATE"}, head) ||
			slices.ContainsFunc(rows[1:], func(row []string) bool { return row[i] != rows[1][i] }) {
			continue
		}
		switch value := ansi.Strip(rows[1][i]); {
		case value == "-" || head == "STATE" && value == "current" || head == "KEPT" &&
			value == "whole":
		default:
			common = append(common, strings.ToLower(head)+" "+value)
		}
		for r := range rows {
			rows[r] = slices.Delete(rows[r], i, i+1)
		}
	}
	if len(common) > 0 {
		slices.Reverse(common)
		p.Line("%s", p.Bold("all: "+strings.Join(common, ", ")))
	}
	return rows
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

// buildRows returns the rows of a table of builds, with a head if first is set.
func buildRows(p *term.Printer, builds []*wire.Build, first, long bool) (rows [][]string) {
	if len(builds) == 0 {
		return nil
	}
	if first {
		rows = [][]string{{"BUILD", "MODEL", "EP", "VERSION", "SDK", "FITS", "SIZE", "HITS",
			"LAST USED", "GAIN", "KEPT", "STATE"}}
	}
	for _, b := range builds {
		model, state := modelColumn(b), term.TextOrDash(b.GetState())
		if path := b.GetModelPath(); long && path != "" {
			model = term.Printable(path)
		}
		key := term.Short(b.GetBuild())
		if p.Width > 0 && p.Width < 100 {
			key = key[:min(len(key), 8)] // the fewest digits that the daemon accepts
		}
		if b.GetPinned() {
			state += ", pinned"
		}
		rows = append(rows, []string{
			key, model, term.TextOrDash(b.GetEp()), term.TextOrDash(b.GetEpVersion()),
			term.TextOrDash(b.GetSdkVersion()), p.State(cmp.Or(verdict(b.GetCompatibility()), "-")),
			term.Bytes(sizeOf(b)), fmt.Sprint(b.GetHits()), p.When(b.GetLastUsedMs()),
			gainColumn(b), term.TextOrDash(b.GetKeptAs()), p.State(state),
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
