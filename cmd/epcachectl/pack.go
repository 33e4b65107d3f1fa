package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newPack(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pack ENTRY|MODEL...|--all [-n]",
		Short: "store builds as deltas of similar builds",
		Long: `pack keeps builds as recipes: bytes that other builds have too are not stored again.
The next request unpacks the build, in about the time of a copy.

The daemon packs unused builds by itself (see [space] in its configuration). Builds that are in
use, or would free less than 64 KiB, are not packed. ENTRY is as for show; --all means all own
builds, for administrators all.

With -n it compares builds if necessary, and prints what would be freed now and later.` +
			exit.Help(exit.AskingCodes...),
		Example: `  epcachectl pack --all -n
  epcachectl pack mobilenet.onnx`,
	}
	return changePacked(a, cmd, &wire.Pack{}, "pack nothing, print what would be freed")
}

func newUnpack(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "unpack ENTRY|MODEL...|--all [-n]",
		Short: "make packed builds whole again",
		Long: `unpack undoes pack: the builds become whole files again, so that requests need not
unpack them. Pin them too if the daemon shall not pack them again. ENTRY and --all are as for pack.

With -n it prints how many bytes that takes.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl unpack mobilenet.onnx`,
	}
	return changePacked(a, cmd, &wire.Pack{Unpack: true}, "unpack nothing, print how much space "+
		"it would take")
}

func changePacked(a *cli.Call, cmd *cobra.Command, request *wire.Pack,
	dryRun string) *cobra.Command {
	cmd.Flags().BoolVar(&request.All, "all", false, "all builds that you may change")
	cmd.Flags().BoolVarP(&request.DryRun, "dry-run", "n", false, dryRun)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if request.All == (len(args) > 0) {
			text := "name entries, or give --all"
			if request.All {
				text += ", not both"
			}
			return exit.Hint(exit.Usagef("%s: %s", cmd.Name(), text),
				"list builds: epcachectl list")
		}
		return a.WithDaemon(cmd.Context(),
			func(ctx context.Context, c *unixsock.Client) (err error) {
				if request.Entries, err = modelfile.Entries(ctx, args); err != nil {
					return err
				}
				reply, err := cli.AskWithProgress[wire.PackReply](ctx, a, c, request)
				if err != nil {
					return modelfile.AsGiven(err, args, request.Entries)
				}
				return printPacked(a, request.DryRun, reply, cmd.Name()+"ed")
			})
	}
	return cmd
}

func printPacked(a *cli.Call, dryRun bool, r *wire.PackReply, done string) error {
	if a.JSON {
		return a.PrintForScripts(dryRun, r)
	}
	for _, b := range r.GetBuilds() {
		outcome := b.GetOutcome()
		would := dryRun && !strings.HasPrefix(outcome, "kept: ")
		if would {
			outcome = "would be " + outcome
		}
		text := term.Printable(outcome) + freedText(would, b.GetFreesBytes())
		if n := b.GetLaterBytes(); n > 0 {
			text += "; packing would free " + term.Bytes(n) + " later"
		}
		a.Print.Line("%s: build %s of %s: %s", term.TextOrDash(b.GetModelName()),
			term.Short(b.GetBuild()), term.TextOrDash(b.GetEp()), text)
	}
	a.Print.More(uint64(r.GetMore()))
	if dryRun {
		done = "would be " + done
	}
	text := fmt.Sprintf("%s %s%s", term.Count(r.GetChanged(), "build"), done,
		freedText(dryRun, r.GetFreedBytes()))
	if n := r.GetLaterBytes(); n > 0 {
		text += fmt.Sprintf("; about %s more when other builds are no longer in use", term.Bytes(n))
	}
	a.Print.Line("%s", text)
	return nil
}

func freedText(would bool, bytes int64) string {
	verb := "frees"
	switch {
	case bytes == 0:
		return ""
	case would && bytes > 0:
		verb = "would free"
	case would:
		verb = "would take"
	case bytes < 0:
		verb = "takes"
	}
	return fmt.Sprintf(", which %s %s", verb, term.Bytes(max(bytes, -bytes)))
}
