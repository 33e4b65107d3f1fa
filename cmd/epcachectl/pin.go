package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) pinCommand() *cobra.Command {
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "pin ENTRY|MODEL...",
		Short: "keep builds whatever space is short",
		Long: `pin keeps all builds of the entries: the daemon does not collect them, however full the store is and however long they
are not used. What is compiled in a pinned build's place is pinned in turn. A weight-sharing group is one build, and pinned as
one. rm deletes pinned builds as well. ENTRY is as for show. With -n it prints what would be pinned.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl pin mobilenet.onnx`,
		Args:    cli.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.changePins(cmd.Context(), args, dryRun, "pinned", "would pin", func(ctx context.Context, c *unixsock.Client, entries []string) (*wire.ChangeReply, error) {
				return c.Pin(ctx, &wire.Pin{Entries: entries, DryRun: dryRun})
			})
		},
	}
	cmd.Flags().BoolVarP(&dryRun, "dry-run", "n", false, "pin nothing, print what would be")
	return cmd
}

func (a *app) unpinCommand() *cobra.Command {
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "unpin ENTRY|MODEL...",
		Short: "let builds go again when space is short",
		Long: `unpin takes back what pin did. It is no error if a build was not pinned. ENTRY is as for show. With -n it prints what
would be unpinned.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl unpin mobilenet.onnx`,
		Args:    cli.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.changePins(cmd.Context(), args, dryRun, "unpinned", "would unpin", func(ctx context.Context, c *unixsock.Client, entries []string) (*wire.ChangeReply, error) {
				return c.Unpin(ctx, &wire.Unpin{Entries: entries, DryRun: dryRun})
			})
		},
	}
	cmd.Flags().BoolVarP(&dryRun, "dry-run", "n", false, "unpin nothing, print what would be")
	return cmd
}

func (a *app) changePins(ctx context.Context, args []string, dryRun bool, done, would string, change func(context.Context, *unixsock.Client, []string) (*wire.ChangeReply, error)) error {
	return a.WithDaemon(ctx, func(ctx context.Context, c *unixsock.Client) error {
		entries, err := modelfile.Entries(ctx, args)
		if err != nil {
			return err
		}
		reply, err := change(ctx, c, entries)
		if err != nil {
			return exit.During(strings.TrimPrefix(would, "would "), modelfile.AsGiven(err, args, entries))
		}
		return a.printChange(done, would, dryRun, reply)
	})
}
