package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// statusResult is what status --json prints.
type statusResult struct {
	Version             string          `json:"version"`
	PID                 int64           `json:"pid"`
	UptimeSeconds       float64         `json:"uptime_seconds"`
	StateDirectory      string          `json:"state_directory"`
	Socket              string          `json:"socket"`
	UID                 uint32          `json:"uid"`
	Scope               string          `json:"scope"`
	Rights              []string        `json:"rights"`
	Hits                uint64          `json:"hits"`
	Misses              uint64          `json:"misses"`
	Compiles            uint64          `json:"compiles"`
	Failures            uint64          `json:"failures"`
	CompileSecondsSaved float64         `json:"compile_seconds_saved"`
	Connections         uint32          `json:"connections"`
	Jobs                uint32          `json:"jobs"`
	Space               spaceResult     `json:"space"`
	Runtimes            []runtimeResult `json:"runtimes"`
	Warnings            []string        `json:"warnings"`
	Sandbox             []string        `json:"sandbox"`
}

// spaceResult has a number for each name, also where it is 0: scripts do sums with them.
type spaceResult struct {
	LogicalBytes        int64  `json:"logical_bytes"`
	StoredBytes         int64  `json:"stored_bytes"`
	UnpackedBytes       int64  `json:"unpacked_bytes"`
	SavedBySharingBytes int64  `json:"saved_by_sharing_bytes"`
	DeadBytes           int64  `json:"dead_bytes"`
	BudgetBytes         int64  `json:"budget_bytes"`
	Entries             uint64 `json:"entries"`
	Builds              uint64 `json:"builds"`
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

func statusOf(s *wire.StatusReply, h *wire.HelloReply) statusResult {
	space := s.GetSpace()
	return statusResult{
		Version: s.GetVersion(), PID: s.GetPid(), UptimeSeconds: s.GetUptimeSeconds(), StateDirectory: s.GetStateDirectory(),
		Socket: s.GetSocket(), UID: h.GetUid(), Scope: h.GetScope(), Rights: append([]string{}, h.GetRights()...),
		Hits: s.GetHits(), Misses: s.GetMisses(), Compiles: s.GetCompiles(), Failures: s.GetFailures(),
		CompileSecondsSaved: s.GetCompileSecondsSaved(), Connections: s.GetConnections(), Jobs: s.GetJobs(),
		Space: spaceResult{
			space.GetLogicalBytes(), space.GetStoredBytes(), space.GetUnpackedBytes(), space.GetSavedBySharingBytes(),
			space.GetDeadBytes(), space.GetBudgetBytes(), space.GetEntries(), space.GetBuilds(),
		},
		Runtimes: runtimesOf(s.GetRuntimes()), Warnings: append([]string{}, s.GetWarnings()...), Sandbox: append([]string{}, s.GetSandbox()...),
	}
}

func (p *printer) status(s *wire.StatusReply, h *wire.HelloReply) error {
	space := s.GetSpace()
	you := fmt.Sprintf("uid %d, scope %s", h.GetUid(), orDash(h.GetScope()))
	if rights := h.GetRights(); len(rights) > 0 {
		you += ", " + printable(strings.Join(rights, ", "))
	}
	uptime := time.Duration(s.GetUptimeSeconds() * float64(time.Second)).Round(time.Second)
	return p.table([][]string{
		{"daemon", fmt.Sprintf("epcached %s, pid %d, up %v", printable(s.GetVersion()), s.GetPid(), uptime)},
		{"state", orDash(s.GetStateDirectory())},
		{"socket", orDash(s.GetSocket())},
		{"you", you},
		{"requests", strings.Join([]string{counted(s.GetHits(), "hit"), counted(s.GetMisses(), "miss"), counted(s.GetCompiles(), "compile"), counted(s.GetFailures(), "failure")}, ", ")},
		{"saved", seconds(s.GetCompileSecondsSaved()) + " of compiling"},
		{"now", counted(s.GetConnections(), "connection") + ", " + counted(s.GetJobs(), "job")},
		{"space", fmt.Sprintf("%s stored, %s served, %s, %s", byteSize(space.GetStoredBytes()), byteSize(space.GetLogicalBytes()), counted(space.GetEntries(), "entry"), counted(space.GetBuilds(), "build"))},
		{"sandbox", sandboxSummary(s.GetSandbox())},
	})
}
