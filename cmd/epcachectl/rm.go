package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newRm(a *cli.Call) *cobra.Command {
	var request wire.Remove
	var force bool
	cmd := &cobra.Command{
		Use:   "rm ENTRY|MODEL... | rm --all",
		Short: "remove builds",
		Long: `rm removes all builds of the entries. Programs that have loaded them are not
affected. ENTRY is as for show; a model's name means all builds of every model with that name.

--all removes everything that the caller may remove, for administrators also leftovers and the
quarantine. Remembered failures stay (jobs retry --all forgets them). On a terminal it asks before
it removes a pinned build or more than one build, unless --yes is given; without a terminal --all
needs --yes.

With -n it prints what would be removed, and how many bytes that frees.` +
			exit.Help(exit.AskingCodes...),
		Example: `  epcachectl rm mobilenet.onnx
  epcachectl rm --all -n`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if request.All == (len(args) > 0) {
				return exit.Usage(exit.Hint(errors.New("rm: name entries, or give "+
					"--all"), "list builds: epcachectl list"))
			}
			return a.WithDaemon(cmd.Context(),
				func(ctx context.Context, c *unixsock.Client) (err error) {
					if request.Entries, err = modelfile.Entries(ctx, args); err != nil {
						return err
					}
					if !request.DryRun && !force {
						if err := confirm(ctx, a, c, &request, args); err != nil {
							return err
						}
					}
					reply, err := unixsock.Ask[wire.ChangeReply](ctx, c, &request, nil)
					if err != nil {
						return exit.WithVerb("rm", modelfile.AsGiven(err, args, request.Entries))
					}
					if none := len(reply.GetBuilds()) == 0; none && request.All && !a.JSON &&
						!slices.Contains(c.Hello().GetRights(), "administrator") {
						a.Print.Line(
							"nothing to delete: no build is yours alone, and only administrators " +
								"delete shared builds")
						return nil
					}
					return printChange(a, changeWords{done: "deleted", would: "would delete",
						pinned: ", pinned"}, request.DryRun, reply)
				})
		},
	}
	cmd.Flags().BoolVar(&request.All, "all", false, "remove all builds")
	cmd.Flags().BoolVarP(&request.DryRun, "dry-run", "n", false,
		"remove nothing, print what would be removed")
	cmd.Flags().BoolVarP(&force, "yes", "y", false, "do not ask for confirmation; needed for "+
		"--all without a terminal")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "the same as --yes")
	return cmd
}

// confirm asks the user before more than one build is deleted, if there is a terminal. The name of
// a model matches all builds of all models with that name, which may be more than expected.
func confirm(ctx context.Context, a *cli.Call, c *unixsock.Client, request *wire.Remove,
	args []string) error {
	if !a.Print.Terminal || !term.IsTerminal(a.Stdin) { // without a terminal there is no answer
		if request.GetAll() {
			return exit.Usage(exit.Hint(errors.New("rm --all: no terminal for the confirmation"),
				"delete without confirmation: epcachectl rm --all --yes"))
		}
		return nil
	}
	plan, err := unixsock.Ask[wire.ChangeReply](ctx, c,
		&wire.Remove{Entries: request.GetEntries(), All: request.GetAll(), DryRun: true}, nil)
	if err != nil {
		return exit.WithVerb("rm", modelfile.AsGiven(err, args, request.GetEntries()))
	}
	builds := plan.GetBuilds()
	count := uint64(len(builds)) + plan.GetMore()
	if count < 2 && !request.GetAll() && !slices.ContainsFunc(builds, (*wire.Build).GetPinned) {
		return nil
	}
	for i, b := range builds {
		if i == 10 {
			a.Print.Note(fmt.Sprintf("  and %d more", count-uint64(i)))
			break
		}
		a.Print.Note(fmt.Sprintf("  %s: %s, %s", modelColumn(b), buildOf(b, ", pinned"),
			term.Bytes(sizeOf(b))))
	}
	question := "delete " + term.Count(count, "build")
	if n := plan.GetFreedBytes(); n > 0 {
		question += ", " + term.Bytes(n) + " on the disk"
	}
	a.Print.Ask(question + "?")
	answer, err := bufio.NewReader(a.Stdin).ReadString('\n')
	if err != nil || !strings.HasPrefix(strings.ToLower(strings.TrimSpace(answer)), "y") {
		what := "--all"
		if !request.GetAll() {
			what = strings.Join(term.Printables(args), " ")
		}
		return exit.Hint(errors.New("rm: nothing deleted"), "delete without confirmation: "+
			"epcachectl rm "+what+" --yes")
	}
	return nil
}
