package main

import (
	"context"
	"errors"
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

func (a *app) packCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pack ENTRY|MODEL...|--all [-n]",
		Short: "keep builds as what they share with others",
		Long: `pack keeps builds as recipes: most of their bytes stand in other builds of the same
model, or of one like it, and are not stored again; the rest is compressed where that saves an
eighth of it. The next request for a packed build unpacks it, which takes as long as a copy.

The daemon packs builds by itself that were not used for a while; see [space] in its
configuration. Builds that are in use, or were given out in the last ten minutes, stay as they
are, and so do those of which packing would free less than 64 KiB.

ENTRY is as for show; --all means all builds of yours, and for administrators all there are.
With -n it compares builds where that has not been done yet, and prints what would be freed now,
and what would be of builds that are in use or were given out lately, and until when these
stay.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl pack --all -n
  epcachectl pack mobilenet.onnx`,
	}
	return a.changePacked(cmd, &wire.Pack{}, "pack nothing, print what would be freed")
}

func (a *app) unpackCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "unpack ENTRY|MODEL...|--all [-n]",
		Short: "keep builds whole again",
		Long: `unpack takes back what pack did: the builds stand whole in the store again, so that requests need not unpack them. Pin
them as well if the daemon shall not pack them when they are not used for a while. With -n it prints how much they would take. ENTRY
and --all are as for pack.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl unpack mobilenet.onnx`,
	}
	return a.changePacked(cmd, &wire.Pack{Unpack: true}, "unpack nothing, print how much it would take")
}

// changePacked makes a command one that packs builds, or unpacks them.
func (a *app) changePacked(cmd *cobra.Command, request *wire.Pack, dryRun string) *cobra.Command {
	cmd.Flags().BoolVar(&request.All, "all", false, "all builds that you may change")
	cmd.Flags().BoolVarP(&request.DryRun, "dry-run", "n", false, dryRun)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case request.All && len(args) > 0:
			return exit.Usage(exit.During(cmd.Name(), errors.New("name entries, or give --all, not both")))
		case !request.All && len(args) == 0:
			return exit.Usage(exit.During(cmd.Name(), errors.New("name entries, or give --all")))
		}
		return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
			entries, err := modelfile.Entries(ctx, args)
			if err != nil {
				return err
			}
			request.Entries = entries
			reply, err := cli.Shown(&a.Call, func(progress func(*wire.Progress)) (*wire.PackReply, error) {
				return c.Pack(ctx, request, progress)
			})
			if err != nil {
				return modelfile.AsGiven(err, args, entries)
			}
			return a.printPacked(request.DryRun, reply, cmd.Name()+"ed")
		})
	}
	return cmd
}

func (a *app) printPacked(dryRun bool, r *wire.PackReply, done string) error {
	if a.JSON {
		return a.PrintForScripts(dryRun, r)
	}
	for _, b := range r.GetBuilds() {
		outcome := b.GetOutcome()
		would := dryRun && !strings.HasPrefix(outcome, keptMark)
		if would {
			outcome = "would be " + outcome
		}
		text := term.Printable(outcome) + freedText(would, b.GetFreesBytes())
		if n := b.GetLaterBytes(); n > 0 {
			text += "; packing would free " + term.Bytes(n) + " once that is over"
		}
		a.Print.Line("%s: build %s of %s: %s", term.OrDash(b.GetModelName()), term.Short(b.GetBuild()), term.OrDash(b.GetEp()), text)
	}
	if n := r.GetMore(); n > 0 {
		a.Print.Line("and %d more", n)
	}
	if dryRun {
		done = "would be " + done
	}
	text := fmt.Sprintf("%s %s%s", term.Counted(r.GetChanged(), "build"), done, freedText(dryRun, r.GetFreedBytes()))
	if n := r.GetLaterBytes(); n > 0 {
		text += fmt.Sprintf("; %s more, as far as is known, of builds that are in use or were given out lately, once they are not", term.Bytes(n))
	}
	a.Print.Line("%s", text)
	return nil
}

// freedText says what a change frees, or takes, or would.
func freedText(would bool, bytes int64) string {
	frees, takes := "which frees", "which takes"
	if would {
		frees, takes = "which would free", "which would take"
	}
	switch {
	case bytes > 0:
		return fmt.Sprintf(", %s %s", frees, term.Bytes(bytes))
	case bytes < 0:
		return fmt.Sprintf(", %s %s", takes, term.Bytes(-bytes))
	}
	return ""
}

// keptMark stands before why a build stays as it is.
const keptMark = "kept: "
