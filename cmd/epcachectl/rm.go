package main

import (
	"bufio"
	"context"
	"errors"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) rmCommand() *cobra.Command {
	var request wire.Remove
	var force bool
	cmd := &cobra.Command{
		Use:   "rm ENTRY|MODEL... | rm --all",
		Short: "delete builds",
		Long: `rm deletes all builds of the entries. What programs have loaded stays readable for them until they end. ENTRY is as for
show. --all deletes everything that the caller may delete, for administrators also what crashes left and the quarantine; on a terminal it asks first, unless -f is given. With -n it
prints what would be deleted.` + statusHelp(askingCodes...),
		Example: `  epcachectl rm mobilenet.onnx
  epcachectl rm --all -n`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if request.All == (len(args) > 0) {
				return usageError{&hintedError{errors.New("rm: name entries, or give --all"), "see what there is: epcachectl list"}}
			}
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				var err error
				if request.Entries, err = entriesOf(ctx, args); err != nil {
					return err
				}
				if request.All && !request.DryRun && !force {
					if err := a.confirmAll(ctx, c); err != nil {
						return err
					}
				}
				reply, err := c.Remove(ctx, &request)
				if err != nil {
					return err
				}
				return a.printChange("deleted", "would delete", request.DryRun, reply)
			})
		},
	}
	cmd.Flags().BoolVar(&request.All, "all", false, "delete everything")
	cmd.Flags().BoolVarP(&request.DryRun, "dry-run", "n", false, "delete nothing, print what would be")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "do not ask")
	return cmd
}

// confirmAll asks a person; a script that says --all means it.
func (a *app) confirmAll(ctx context.Context, c *unixsock.Client) error {
	f, ok := a.stdin.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || !a.print.terminal {
		return nil
	}
	plan, err := c.Remove(ctx, &wire.Remove{All: true, DryRun: true})
	if err != nil {
		return err
	}
	a.print.ask("delete " + counted(len(plan.GetBuilds()), "build") + "?")
	answer, err := bufio.NewReader(a.stdin).ReadString('\n')
	if err != nil || !strings.HasPrefix(strings.ToLower(strings.TrimSpace(answer)), "y") {
		return &hintedError{errors.New("rm: nothing deleted"), "delete without being asked: epcachectl rm --all -f"}
	}
	return nil
}
