package main

import (
	"context"
	"math"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/remotes"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newPull(a *cli.Call) *cobra.Command {
	g := &acquire.Get{Call: a, Verb: "pull", OnMiss: "fetch"}
	cmd := &cobra.Command{
		Use:   "pull MODEL... [--ep EP[:DEVICE]...] [flags]",
		Short: "fetch builds from remotes",
		// another spelling, which is removed in the next version
		Hidden: true,
		Long: `pull is get --on-miss fetch: it has the daemon
fetch the build of each MODEL from the remotes of its
configuration, unless it is stored already, and compiles nothing. It asks remotes again that did not
have the build a moment ago. Flags say what is requested, as those of get.` +
			exit.Help(exit.WaitingCodes...),
		Example: "  epcachectl pull det.onnx rec.onnx --ep OpenVINOExecutionProvider:CPU",
		Args:    cli.UsageArgs(1, math.MaxInt),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.Run(cmd.Context(), args)
		},
	}
	g.Request.AddFlags(cmd)
	cmd.Flags().BoolVar(&g.Progress, "progress", false,
		"print each phase on a line of its own to standard error")
	return cmd
}

func newPush(a *cli.Call) *cobra.Command {
	var remote string
	cmd := &cobra.Command{
		Use:   "push MODEL|ENTRY...",
		Short: "copy shared builds to remotes",
		Long: `push copies the shared builds of each MODEL or ENTRY to the remotes that have publish
= "shared" in the daemon's configuration, signed by the daemon's key, and waits for that. A build
holds its model's weights. Private builds, and those of other machines, are not copied.` +
			exit.Help(exit.WaitingCodes...),
		Example: "  epcachectl push det.onnx --remote fleet",
		Args:    cli.UsageArgs(1, math.MaxInt),
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client, args []string) error {
			entries := make([]string, len(args))
			for i, arg := range args {
				var err error
				if entries[i], err = modelfile.Entry(ctx, arg); err != nil {
					return exit.WithOperation("push", arg, err)
				}
			}
			reply, err := cli.AskWithProgress[wire.PushReply](ctx, a, c,
				&wire.Push{Entries: entries, Remote: remote})
			if err != nil {
				return err
			}
			return printPushed(a, reply)
		}),
	}
	cmd.Flags().StringVar(&remote, "remote", "", "copy to the remote `NAME` only")
	return cmd
}

func printPushed(a *cli.Call, reply *wire.PushReply) error {
	done := len(reply.GetBuilds()) > 0
	rows := [][]string{{"MODEL", "BUILD", "REMOTE", "RESULT"}}
	for _, b := range reply.GetBuilds() {
		done = done && b.GetDone()
		text := b.GetText()
		if !b.GetDone() {
			text = "not published: " + text
		}
		rows = append(rows, []string{term.Printable(b.GetModel()), term.Short(b.GetBuild()),
			term.Printable(b.GetRemote()), term.Printable(text)})
	}
	if a.JSON {
		if err := a.Print.JSON(jsonout.Of(reply)); err != nil {
			return err
		}
	} else {
		a.Print.Table(rows)
	}
	if !done {
		return exit.Status(exit.Failed)
	}
	return nil
}

func newRemote(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "remote status|check|revoke|gc",
		Short: "show remotes, try and maintain them",
		Long: `remote shows and maintains the stores that machines share: [remote.NAME] in the
daemon's configuration.` + exit.Help(exit.Done, exit.BadUsage),
		Example: "  epcachectl remote status\n  epcachectl remote check fleet",
		Args:    cli.UsageArgs(0, 0),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newRemoteStatus(a), remotes.NewCheck(a), remotes.NewRevoke(a), remotes.NewGC(a))
	return cmd
}

func newRemoteStatus(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "show the results of calls to remotes",
		Long: `status prints for each remote whether it answers, how much was fetched from it and
copied to it since the daemon's start, and its last error.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon),
		Example: "  epcachectl remote status --json",
		Args:    cli.UsageArgs(0, 0),
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client, _ []string) error {
			s, err := unixsock.Ask[wire.StatusReply](ctx, c, &wire.Status{}, nil)
			if err != nil {
				return err
			}
			if a.JSON {
				return a.Print.JSON(jsonout.Object{"remotes": jsonout.List(s.GetRemotes())})
			}
			if len(s.GetRemotes()) == 0 {
				a.Print.Line("no remote is configured")
			}
			for i, r := range s.GetRemotes() {
				if i > 0 {
					a.Print.Line("")
				}
				a.Print.Table(remotes.Rows(r))
			}
			return nil
		}),
	}
}
