package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newPin(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pin ENTRY|MODEL...",
		Short: "keep builds whatever space is short",
		Long: `pin keeps all builds of the entries: the daemon does not collect them, however full the store is and however long they
are not used. What is compiled in a pinned build's place is pinned in turn. A weight-sharing group is one build, and pinned as
one. rm deletes pinned builds as well. ENTRY is as for show. With -n it prints what would be pinned.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl pin mobilenet.onnx`,
	}
	words := changeWords{"pinned", "would pin", "pin nothing, print what would be"}
	return change(a, cmd, words, func(ctx context.Context, c *unixsock.Client, entries []string,
		dryRun bool) (*wire.ChangeReply, error) {
		return unixsock.Ask[wire.ChangeReply](ctx, c, &wire.Pin{Entries: entries, DryRun: dryRun}, nil)
	})
}

func newUnpin(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "unpin ENTRY|MODEL...",
		Short: "let builds go again when space is short",
		Long: `unpin takes back what pin did. It is no error if a build was not pinned. ENTRY is as for show. With -n it prints what
would be unpinned.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl unpin mobilenet.onnx`,
	}
	words := changeWords{"unpinned", "would unpin", "unpin nothing, print what would be"}
	return change(a, cmd, words, func(ctx context.Context, c *unixsock.Client, entries []string,
		dryRun bool) (*wire.ChangeReply, error) {
		return unixsock.Ask[wire.ChangeReply](ctx, c, &wire.Unpin{Entries: entries, DryRun: dryRun}, nil)
	})
}
