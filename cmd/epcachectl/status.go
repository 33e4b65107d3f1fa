package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/remotes"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newStatus(a *cli.Call) *cobra.Command {
	var watch bool
	every := 2 * time.Second
	cmd := &cobra.Command{
		Use:   "status [--watch]",
		Short: "show the daemon's status",
		Long: `status prints the daemon's version, configuration and health, the caller's rights,
hits and the time that they saved, and the space in use. --watch repeats that until it is
interrupted, also over restarts of the daemon; with --json it prints an object a line.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed),
		Example: `  epcachectl status --json
  epcachectl status --watch --every 1s`,
		Args: cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !watch && cmd.Flags().Changed("every") {
				return exit.Usagef("status: --every needs --watch")
			}
			if every < 100*time.Millisecond {
				return exit.Usagef("--every %v: must be 100ms or more", every)
			}
			if watch {
				return watchStatus(cmd.Context(), a, every)
			}
			a.Looks = true
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				s, err := unixsock.Ask[wire.StatusReply](ctx, c, &wire.Status{}, nil)
				if err != nil {
					return err
				}
				for _, warning := range s.GetWarnings() {
					a.Print.Warning(term.Printable(warning))
				}
				if a.JSON {
					return a.Print.JSON(statusOf(s, c.Hello()))
				}
				printStatusTable(a.Print, s, c.Hello())
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "repeat until interrupted")
	cmd.Flags().DurationVar(&every, "every", every, "with --watch, repeat every `DURATION`")
	return cmd
}

func statusOf(s *wire.StatusReply, h *wire.HelloReply) jsonout.Object {
	out := jsonout.Of(s)
	maps.Copy(out, jsonout.Of(h, "uid", "scope", "rights"))
	out["space"] = spaceOf(s.GetSpace())
	return out
}

func printStatusTable(p *term.Printer, s *wire.StatusReply, h *wire.HelloReply) {
	you := fmt.Sprintf("uid %d, scope %s", h.GetUid(), term.TextOrDash(h.GetScope()))
	if rights := h.GetRights(); len(rights) > 0 {
		you += ", " + term.Printable(strings.Join(rights, ", "))
	}
	uptime := time.Duration(s.GetUptimeSeconds() * float64(time.Second)).Round(time.Second)
	rows := [][]string{
		{"daemon", fmt.Sprintf("epcached %s, pid %d, up %v", term.Printable(s.GetVersion()),
			s.GetPid(), uptime)},
		{"state", term.TextOrDash(s.GetStateDirectory())},
		{"socket", term.TextOrDash(s.GetSocket()) + startedBy[s.GetStartedBy()]},
		{"you", you},
	}
	if slices.Contains(h.GetRights(), "administrator") {
		rows = append(rows,
			[]string{"requests", strings.Join([]string{term.Count(s.GetHits(), "hit"),
				term.Count(s.GetMisses(), "miss"), term.Count(s.GetCompiles(), "compile"),
				term.Count(s.GetFailures(), "failure")}, ", ")},
			[]string{"saved", term.Seconds(s.GetCompileSecondsSaved()) + " of compiling"},
			[]string{"now", term.Count(s.GetConnections(), "connection") + ", " +
				term.Count(s.GetJobs(), "job")},
			[]string{"space", spaceLine(s.GetSpace())}, []string{"", spaceDetails(s.GetSpace())})
	} else {
		rows = append(rows, []string{"now", term.Count(s.GetJobs(), "job") + " of yours"},
			[]string{"space", spaceLine(s.GetSpace())})
	}
	for _, l := range s.GetLayers() {
		text := fmt.Sprintf("%s: %s, %s", term.Printable(l.GetPath()),
			term.Count(l.GetBuilds(), "build"), term.Bytes(l.GetBytes()))
		if n := len(l.GetRefused()); n > 0 {
			text += fmt.Sprintf(", %d not used (epcachectl doctor)", n)
		}
		if why := l.GetError(); why != "" {
			text = fmt.Sprintf("%s is not used: %s", term.Printable(l.GetPath()),
				term.Printable(why))
		}
		rows = append(rows, []string{"layer", text})
	}
	rows = append(rows, []string{"sandbox", sandboxSummary(s.GetSandbox())})
	if line := sourcelessLine(s.GetSourceless()); line != "" {
		rows = append(rows, []string{"rebuilds", line})
	}
	for _, r := range s.GetRemotes() {
		rows = append(rows, []string{"remote " + term.Printable(r.GetName()), remotes.Line(r)})
	}
	if text := s.GetVerified(); text != "" {
		rows = append(rows, []string{"verified", term.Printable(text)})
	}
	p.Table(rows)
}

var startedBy = map[string]string{
	"socket":  ", started by systemd when a program connects",
	"service": ", started as a service",
	"client":  ", started by a client",
}

func spaceDetails(s *wire.Space) string {
	parts := []string{term.Bytes(s.GetFreeBytes()) + " free"}
	for _, one := range []struct {
		bytes int64
		what  string
	}{
		{s.GetFloorBytes(), "to stay free"}, {s.GetPinnedBytes(), "pinned"},
		{s.GetHeldBytes(), "removed and still open"}, {s.GetReservedBytes(), "being stored"},
		{s.GetDeadBytes(), "not served"},
	} {
		if one.bytes > 0 {
			parts = append(parts, term.Bytes(one.bytes)+" "+one.what)
		}
	}
	parts = append(parts, term.Count(s.GetEvicted(), "build")+" evicted")
	if s.GetToLookAt() > 0 {
		parts = append(parts, term.Count(s.GetToLookAt(), "blob")+" not yet compared with others")
	}
	if s.GetUnkept() > 0 {
		parts = append(parts, term.Count(s.GetUnkept(), "compile")+
			" not stored since the store was made (epcachectl doctor: of the last 7 days)")
	}
	return strings.Join(parts, ", ")
}

// watchStatus prints the status repeatedly until the context ends.
func watchStatus(ctx context.Context, a *cli.Call, every time.Duration) error {
	return a.AcrossRestarts(ctx, func(ctx context.Context, c *unixsock.Client) error {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for first := true; ; first = false {
			s, err := unixsock.Ask[wire.StatusReply](ctx, c, &wire.Status{}, nil)
			if err == nil {
				err = redrawStatus(a, s, c.Hello(), first)
			}
			if err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}, func() {})
}

// redrawStatus redraws the screen of a terminal; elsewhere it prints an empty line in between.
func redrawStatus(a *cli.Call, s *wire.StatusReply, h *wire.HelloReply, first bool) error {
	if a.JSON {
		return a.Print.JSONLine(statusOf(s, h))
	}
	if term.IsTerminal(a.Print.Out) {
		a.Print.Home()
		a.Print.Line("%s", time.Now().Format(time.RFC3339))
	} else if !first {
		a.Print.Line("")
	}
	for _, warning := range s.GetWarnings() {
		a.Print.Line("warning: %s", term.Printable(warning))
	}
	printStatusTable(a.Print, s, h)
	return nil
}
