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
	StartedBy           string          `json:"started_by"` // "socket": systemd passed it; "service", "client", ""
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
	// builds that only a request can have compiled again
	Sourceless sourcelessJSON `json:"sourceless"`
}

type sourcelessJSON struct {
	Builds uint64            `json:"builds"`
	Looked uint64            `json:"looked"` // of a large store not all
	Why    map[string]uint64 `json:"why"`    // builds, by the reason
}

func sourcelessOf(s *wire.Sourceless) sourcelessJSON {
	out := sourcelessJSON{Builds: s.GetBuilds(), Looked: s.GetLooked(),
		Why: make(map[string]uint64)}
	for _, why := range s.GetWhy() {
		out.Why[why.GetText()] = why.GetBuilds()
	}
	return out
}

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

// spaceResult has a number for each name, also where it is 0: scripts do sums with them.
type spaceResult struct {
	LogicalBytes        int64  `json:"logical_bytes"`
	UniqueBytes         int64  `json:"unique_bytes"`
	UnpackedBytes       int64  `json:"unpacked_bytes"`
	SavedBySharingBytes int64  `json:"saved_by_sharing_bytes"`
	DeadBytes           int64  `json:"dead_bytes"`
	BudgetBytes         int64  `json:"budget_bytes"`
	Entries             uint64 `json:"entries"`
	Builds              uint64 `json:"builds"`
	UsedBytes           int64  `json:"used_bytes"` // on disk: what counts against the budget: the next four, and what is unpacked
	DiskBytes           int64  `json:"disk_bytes"`
	ManifestBytes       int64  `json:"manifest_bytes"`
	HeldBytes           int64  `json:"held_bytes"`
	ReservedBytes       int64  `json:"reserved_bytes"`
	PinnedBytes         int64  `json:"pinned_bytes"`
	FreeBytes           int64  `json:"free_bytes"`
	FloorBytes          int64  `json:"floor_bytes"`
	MaxEntries          uint64 `json:"max_entries"`
	Evicted             uint64 `json:"evicted"`
	Unkept              uint64 `json:"unkept"`
	ToLookAt            uint64 `json:"to_look_at"` // blobs of which is not known yet what they share with others
}

func spaceOf(s *wire.Space) spaceResult {
	return spaceResult{s.GetLogicalBytes(), s.GetUniqueBytes(), s.GetUnpackedBytes(), s.GetSavedBySharingBytes(), s.GetDeadBytes(),
		s.GetBudgetBytes(), s.GetEntries(), s.GetBuilds(), s.GetDiskBytes() + s.GetUnpackedBytes() + s.GetManifestBytes() + s.GetHeldBytes() + s.GetReservedBytes(),
		s.GetDiskBytes(), s.GetManifestBytes(), s.GetHeldBytes(), s.GetReservedBytes(), s.GetPinnedBytes(), s.GetFreeBytes(), s.GetFloorBytes(),
		s.GetMaxEntries(), s.GetEvicted(), s.GetUnkept(), s.GetToLookAt()}
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
	return statusResult{
		Version: s.GetVersion(), PID: s.GetPid(), UptimeSeconds: s.GetUptimeSeconds(), StateDirectory: s.GetStateDirectory(),
		Socket: s.GetSocket(), StartedBy: s.GetStartedBy(), UID: h.GetUid(), Scope: h.GetScope(), Rights: append([]string{}, h.GetRights()...),
		Hits: s.GetHits(), Misses: s.GetMisses(), Compiles: s.GetCompiles(), Failures: s.GetFailures(),
		CompileSecondsSaved: s.GetCompileSecondsSaved(), Connections: s.GetConnections(), Jobs: s.GetJobs(),
		Space:    spaceOf(s.GetSpace()),
		Runtimes: runtimesOf(s.GetRuntimes()), Warnings: append([]string{}, s.GetWarnings()...), Sandbox: append([]string{}, s.GetSandbox()...),
		Sourceless: sourcelessOf(s.GetSourceless()),
	}
}

func (p *printer) status(s *wire.StatusReply, h *wire.HelloReply) error {
	space := spaceOf(s.GetSpace())
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
		{"space", spaceLine(&space)},
		{"", spaceDetails(&space)},
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
func spaceDetails(s *spaceResult) string {
	parts := []string{byteSize(s.FreeBytes) + " free"}
	for _, one := range []struct {
		bytes int64
		what  string
	}{{s.FloorBytes, "to stay free"}, {s.PinnedBytes, "pinned"}, {s.HeldBytes, "removed and still open"}, {s.ReservedBytes, "being stored"}, {s.DeadBytes, "not served"}} {
		if one.bytes > 0 {
			parts = append(parts, byteSize(one.bytes)+" "+one.what)
		}
	}
	parts = append(parts, counted(s.Evicted, "build")+" evicted")
	if s.ToLookAt > 0 {
		parts = append(parts, counted(s.ToLookAt, "blob")+" still to be compared with others")
	}
	if s.Unkept > 0 {
		parts = append(parts, counted(s.Unkept, "result")+" not kept")
	}
	return strings.Join(parts, ", ")
}
