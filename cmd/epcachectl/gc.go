package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newGc(a *cli.Call) *cobra.Command {
	var request wire.Collect
	cmd := &cobra.Command{
		Use:   "gc [SIZE] [-n]",
		Short: "evict the least valuable builds",
		Long: `gc evicts builds until the store is within the bounds of its configuration ([space]:
budget, free_floor, max_unused), or until builds take at most SIZE on disk, such as 500MiB, 20GiB
or 0. The daemon does the former by itself.

The order is: builds unused for too long; then, for space, withheld builds, replaced builds, and
those with the least compile time and recent use for their bytes. why --ep explains an evicted
build later.

Builds that are pinned or in use are not evicted, nor those whose path was printed in the last ten
minutes. Users evict their own builds, administrators all. If the goal cannot be reached, the last
line says by how much (short_bytes with --json), and the exit status is 8.

With -n it prints the plan, evicts nothing, and exits as the plan would.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed,
				exit.Short),
		Example: `  epcachectl gc -n
  epcachectl gc 20GiB -n`,
		Args: cli.UsageArgs(0, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				bytes, ok := bytesize.Parse(args[0])
				if !ok {
					return exit.Usagef("gc: %q is not a size, such as 500MiB or 20GiB", args[0])
				}
				request.ToBytes = &bytes
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				reply, err := cli.AskWithProgress[wire.CollectReply](ctx, a, c, &request)
				if err == nil {
					err = printCollection(a, request.DryRun, reply)
				}
				if err == nil && reply.GetShortBytes() > 0 {
					return exit.Status(exit.Short) // the last line has the text
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVarP(&request.DryRun, "dry-run", "n", false, "change nothing, print the plan")
	return cmd
}

func printCollection(a *cli.Call, dryRun bool, r *wire.CollectReply) error {
	if a.JSON {
		return a.PrintForScripts(dryRun, r)
	}
	for _, one := range r.GetSteps() {
		a.Print.Line("%s", stepLine(one))
	}
	a.Print.More(uint64(r.GetMore()))
	for _, k := range r.GetKept() {
		of := ""
		if k.GetBuilds() > 0 {
			of = term.Count(k.GetBuilds(), "build") + ", "
		}
		a.Print.Line("kept, %s: %s%s", term.Printable(k.GetReason()), of, term.Bytes(k.GetBytes()))
	}
	done := "freed"
	if dryRun {
		done = "would be freed"
	}
	a.Print.Line("%s of %s %s: %s removed, %d packed, %s dropped", term.Bytes(r.GetFreedBytes()),
		term.Bytes(r.GetUsedBytes()), done, term.Count(r.GetRemoved(), "build"), r.GetPacked(),
		term.Count(r.GetCopies(), "unpacked copy"))
	if n := r.GetShortBytes(); n > 0 {
		a.Print.Line("still %s above %s: the remaining builds are pinned or in use", term.Bytes(n),
			term.Bytes(r.GetBudgetBytes()))
	}
	return nil
}

func stepLine(s *wire.CollectStep) string {
	what, frees := term.Printable(s.GetOutcome()), "frees"
	if what == "planned" {
		what, frees = "would "+term.Printable(s.GetAction()), "would free"
	}
	model := term.TextOrDash(s.GetModelName())
	if n := s.GetModels(); n > 1 {
		model += fmt.Sprintf(" +%d", n-1)
	}
	return fmt.Sprintf("%s %s: build %s of %s, %s %s: %s", what, model, term.Short(s.GetBuild()),
		term.TextOrDash(s.GetEp()), frees, term.Bytes(s.GetFreesBytes()),
		term.Printable(s.GetReason()))
}
