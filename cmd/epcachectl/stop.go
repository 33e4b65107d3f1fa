package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// restartHints says how to start a daemon again, by how it was started.
var restartHints = map[string]string{
	"socket": "systemd restarts it when a program connects; to keep it stopped: systemctl stop " +
		"epcached.socket epcached.service",
	"service": "systemd does not restart it; to restart it: systemctl start epcached.service",
	"client": "the next program that needs a daemon starts one again; " +
		"to prevent that: " + daemon.AutostartVariable +
		"=0, or autostart = false in epcached.toml",
	"": "to start it again, run the command that started it",
}

func newStop(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "stop",
		Short: "stop the daemon",
		Long: `stop ends the daemon, as SIGTERM does. The running requests have 20 seconds to end,
and builds in use stay valid. stop returns when the process has ended, so that the state directory
may be removed, and prints what would start a daemon again. It is for the daemon's user and
administrators.

stop never starts a daemon. If the socket is a systemd unit, the connection may start one, which
stop then ends.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed),
		Example: `  epcachectl stop
  epcachectl stop --json --socket /run/epcached/epcached.sock`,
		Args: cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.Looks = true
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return stop(ctx, a, c)
			})
		},
	}
}

func stop(ctx context.Context, a *cli.Call, c *unixsock.Client) error {
	s, err := unixsock.Ask[wire.StatusReply](ctx, c, &wire.Status{}, nil)
	if err != nil {
		return err
	}
	if err := c.Stop(ctx); err != nil {
		return exit.WithVerb("stop", err)
	}
	again := restartHints[s.GetStartedBy()]
	if a.JSON {
		out := jsonout.Of(s, "pid", "socket", "state_directory", "started_by")
		out["again"] = again // what starts a daemon again, and how to prevent it
		return a.Print.JSON(out)
	}
	a.Print.Line("stopped epcached, pid %d, at %s", s.GetPid(), term.Printable(s.GetSocket()))
	a.Print.Hint(again)
	return nil
}
