package main

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// sourcelessLine says how many builds only a request can have compiled again, and why; "" for none.
func sourcelessLine(s *wire.Sourceless) string {
	if s.GetBuilds() == 0 {
		return ""
	}
	var why []string
	for _, one := range s.GetWhy() {
		why = append(why, fmt.Sprintf("%d: %s", one.GetBuilds(), printable(one.GetText())))
	}
	return fmt.Sprintf("%d of %s cannot be compiled again without a request (%s)", s.GetBuilds(),
		counted(s.GetLooked(), "build"), strings.Join(why, "; "))
}

// usedBytes is what counts against the budget.
func usedBytes(s *wire.Space) int64 {
	return s.GetDiskBytes() + s.GetUnpackedBytes() + s.GetManifestBytes() + s.GetHeldBytes() + s.GetReservedBytes()
}

func spaceOf(s *wire.Space) object {
	out := objectOf(s)
	out["used_bytes"] = usedBytes(s)
	return out
}

func (a *app) statusCommand() *cobra.Command {
	var watch bool
	every := 2 * time.Second
	cmd := &cobra.Command{
		Use:   "status [--watch]",
		Short: "print how the daemon is",
		Long: `status prints the daemon's health: what it runs with, who the caller is to it, hits and the time they saved,
and the space that is used. --watch prints it again and again until it is interrupted, also over restarts of the daemon; with
--json an object on each line.` + statusHelp(exitDone, exitFailed, exitUsage, exitNoDaemon, exitNotAllowed),
		Example: `  epcachectl status --json
  epcachectl status --watch --every 1s`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return usageError{fmt.Errorf("--every %v: it is 100ms or more", every)}
			}
			if watch {
				return a.watchStatus(cmd.Context(), every)
			}
			a.looks = true
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				s, err := c.Status(ctx)
				if err != nil {
					return err
				}
				for _, warning := range s.GetWarnings() {
					a.print.warning(printable(warning))
				}
				if a.json {
					return a.print.json(statusOf(s, c.Hello()))
				}
				return a.print.status(s, c.Hello())
			})
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "print it again and again")
	cmd.Flags().DurationVar(&every, "every", every, "with --watch, `DURATION` from one to the next")
	return cmd
}

func statusOf(s *wire.StatusReply, h *wire.HelloReply) object {
	out := objectOf(s)
	maps.Copy(out, objectOf(h, "uid", "scope", "rights"))
	out["space"] = spaceOf(s.GetSpace())
	return out
}

func (p *printer) status(s *wire.StatusReply, h *wire.HelloReply) error {
	you := fmt.Sprintf("uid %d, scope %s", h.GetUid(), orDash(h.GetScope()))
	if rights := h.GetRights(); len(rights) > 0 {
		you += ", " + printable(strings.Join(rights, ", "))
	}
	uptime := time.Duration(s.GetUptimeSeconds() * float64(time.Second)).Round(time.Second)
	rows := [][]string{
		{"daemon", fmt.Sprintf("epcached %s, pid %d, up %v", printable(s.GetVersion()), s.GetPid(), uptime)},
		{"state", orDash(s.GetStateDirectory())},
		{"socket", orDash(s.GetSocket()) + startedBy[s.GetStartedBy()]},
		{"you", you},
		{"requests", strings.Join([]string{counted(s.GetHits(), "hit"), counted(s.GetMisses(), "miss"), counted(s.GetCompiles(), "compile"), counted(s.GetFailures(), "failure")}, ", ")},
		{"saved", seconds(s.GetCompileSecondsSaved()) + " of compiling"},
		{"now", counted(s.GetConnections(), "connection") + ", " + counted(s.GetJobs(), "job")},
		{"space", spaceLine(s.GetSpace())},
		{"", spaceDetails(s.GetSpace())},
		{"sandbox", sandboxSummary(s.GetSandbox())},
	}
	if line := sourcelessLine(s.GetSourceless()); line != "" {
		rows = append(rows, []string{"rebuilds", line})
	}
	return p.table(rows)
}

// startedBy says in words what started the daemon.
var startedBy = map[string]string{
	"socket":  ", systemd's: it starts the daemon when a program connects",
	"service": ", started as a service",
	"client":  ", started by a program that needed it",
}

// spaceDetails says what else there is to know of the space.
func spaceDetails(s *wire.Space) string {
	parts := []string{byteSize(s.GetFreeBytes()) + " free"}
	for _, one := range []struct {
		bytes int64
		what  string
	}{
		{s.GetFloorBytes(), "to stay free"}, {s.GetPinnedBytes(), "pinned"},
		{s.GetHeldBytes(), "removed and still open"}, {s.GetReservedBytes(), "being stored"},
		{s.GetDeadBytes(), "not served"},
	} {
		if one.bytes > 0 {
			parts = append(parts, byteSize(one.bytes)+" "+one.what)
		}
	}
	parts = append(parts, counted(s.GetEvicted(), "build")+" evicted")
	if s.GetToLookAt() > 0 {
		parts = append(parts, counted(s.GetToLookAt(), "blob")+" still to be compared with others")
	}
	if s.GetUnkept() > 0 {
		parts = append(parts, counted(s.GetUnkept(), "result")+" not kept")
	}
	return strings.Join(parts, ", ")
}
