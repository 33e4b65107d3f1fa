package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) eventsCommand() *cobra.Command {
	var since string
	var limit uint32
	var follow bool
	cmd := &cobra.Command{
		Use:   "events [--since T] [--follow]",
		Short: "print what happened",
		Long: `events prints what the daemon did and noticed, a line each, oldest first: compiles, damage, changes of runtimes and
drivers, judgements, builds that were withheld, rebuilt or deleted, reports. Of builds it shows those that the caller may
see. Hits are no events; status counts them. Nor is what changes no build: that one is packed, unpacked, or loses its copy;
show tells how each is kept.

--since takes a duration (2h, 3d), a time of day, a day, or a time (14:30, 2026-11-21, 2026-11-21T14:30:00Z). --follow goes on
with what happens, without --since from now on, until it is interrupted; it waits for a daemon that is restarted, and
misses and repeats nothing. --json prints one object on each line.` + exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed),
		Example: `  epcachectl events --since 1d
  epcachectl events --follow --json | jq 'select(.kind == "withheld")'`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var from time.Time
			if since != "" {
				var err error
				if from, err = parseSince(since, time.Now()); err != nil {
					return exit.Usage(err)
				}
			}
			if follow {
				if since == "" {
					from = time.Now()
				}
				return a.follow(cmd.Context(), from, limit)
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				reply, err := c.Events(ctx, &wire.Events{SinceMs: sinceMs(from), Limit: limit})
				if err != nil {
					return err
				}
				return a.printEvents(reply.GetEvents())
			})
		},
	}
	cmd.Flags().StringVar(&since, "since", "", "only what happened since `T`")
	cmd.Flags().Uint32Var(&limit, "limit", 0, "only the newest `N` of what has happened")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what happens")
	return cmd
}

func sinceMs(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return max(1, at.UnixMilli()) // 0 would be all
}

func (a *app) printEvents(events []*wire.Event) error {
	for _, e := range events {
		if err := a.printEvent(e); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) printEvent(e *wire.Event) error {
	if !a.JSON {
		a.Print.Line("%s", eventLine(e))
		return nil
	}
	a.Print.Clear()
	enc := json.NewEncoder(a.Print.Out) // not the printer's: one line for each, and not one document
	enc.SetEscapeHTML(false)
	return enc.Encode(jsonout.Of(e))
}

func eventLine(e *wire.Event) string {
	line := fmt.Sprintf("%s  %-11s", term.Time(e.GetAtMs()), term.Printable(e.GetKind()))
	if e.GetModel() != "" {
		line += "  " + term.Printable(e.GetModel())
	}
	if e.GetBuild() != "" {
		line += "  build " + term.Printable(term.Short(e.GetBuild()))
	}
	if e.GetRuntime() != "" {
		line += "  " + term.Printable(e.GetRuntime())
	}
	if e.GetText() != "" {
		line += "  " + term.Printable(e.GetText())
	}
	return line
}
