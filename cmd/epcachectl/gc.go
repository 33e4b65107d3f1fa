package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// gcResult is what gc prints with --json.
type gcResult struct {
	DryRun      bool            `json:"dry_run"`
	UsedBytes   int64           `json:"used_bytes"` // before
	ToBytes     int64           `json:"to_bytes"`
	FreedBytes  int64           `json:"freed_bytes"`
	ShortBytes  int64           `json:"short_bytes"` // so much more should go, and may not
	Removed     uint64          `json:"removed"`
	Considered  uint64          `json:"considered"`
	PlanSeconds float64         `json:"plan_seconds"`
	Removals    []removalResult `json:"removals"`
	More        uint32          `json:"more"` // removals that are not listed
	Kept        []keptResult    `json:"kept"`
}

type removalResult struct {
	Build          string  `json:"build"`
	ModelName      string  `json:"model_name"`
	EP             string  `json:"ep"`
	Scope          string  `json:"scope"`
	Models         uint32  `json:"models"`
	FreesBytes     int64   `json:"frees_bytes"`
	Reason         string  `json:"reason"`
	Outcome        string  `json:"outcome"`
	CompileSeconds float64 `json:"compile_seconds"`
	LastUsedMs     int64   `json:"last_used_ms"`
}

type keptResult struct {
	Reason string `json:"reason"`
	Builds uint64 `json:"builds"`
	Bytes  int64  `json:"bytes"`
}

func (a *app) gcCommand() *cobra.Command {
	var to string
	var request wire.Collect
	cmd := &cobra.Command{
		Use:   "gc --to SIZE [-n]",
		Short: "remove the builds that pay least",
		Long: `gc removes builds until what is kept takes at most SIZE on disk, such as 500MiB, 20GiB or 0. Builds that are not served go
first, then those that a newer one has taken the place of, then those whose compile time and recent use pay least for
their bytes. What is pinned, in use, or was given out in the last ten minutes stays, and so does what is used while gc
works. A weight-sharing group is one build. why tells of each later that it was evicted. Users collect among their own builds,
administrators among all. With -n it prints the plan and removes nothing.` + statusHelp(exitDone, exitFailed, exitUsage, exitNoDaemon, exitNotAllowed),
		Example: `  epcachectl gc --to 20GiB -n`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			bytes, err := parseSize(to)
			if err != nil {
				return usageError{fmt.Errorf("gc: --to: %w", err)}
			}
			request.ToBytes = &bytes
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				reply, err := c.Collect(ctx, &request, nil)
				if err != nil {
					return err
				}
				return a.printCollection(request.DryRun, reply)
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "`SIZE` on disk that is to stay at most")
	cmd.Flags().BoolVarP(&request.DryRun, "dry-run", "n", false, "remove nothing, print the plan")
	return cmd
}

// parseSize reads a number of bytes, or one with KiB, MiB, GiB or TiB behind it.
func parseSize(text string) (int64, error) {
	if text == "" {
		return 0, errors.New("say how much is to stay, such as 20GiB")
	}
	digits, unit := text, 1.0
	for i, name := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if rest, ok := strings.CutSuffix(text, name); ok {
			digits, unit = rest, math.Exp2(float64(10*(i+1)))
		}
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(digits), 64)
	if err != nil || !(n >= 0) || n*unit >= math.MaxInt64 {
		return 0, fmt.Errorf("%q is no size, such as 500MiB or 20GiB", text)
	}
	return int64(n * unit), nil
}

func (a *app) printCollection(dryRun bool, r *wire.CollectReply) error {
	if a.json {
		return a.print.json(collectionOf(dryRun, r))
	}
	for _, one := range r.GetRemovals() {
		what := orDash(one.GetModelName())
		if n := one.GetModels(); n > 1 {
			what += fmt.Sprintf(" +%d", n-1)
		}
		a.print.line("%s %s: build %s of %s, %s: %s", printable(one.GetOutcome()), what, short(one.GetBuild()), orDash(one.GetEp()), byteSize(one.GetFreesBytes()), printable(one.GetReason()))
	}
	if n := r.GetMore(); n > 0 {
		a.print.line("and %d more", n)
	}
	for _, k := range r.GetKept() {
		a.print.line("kept, %s: %s, %s", printable(k.GetReason()), counted(k.GetBuilds(), "build"), byteSize(k.GetBytes()))
	}
	done := "freed"
	if dryRun {
		done = "would be freed"
	}
	a.print.line("%s of %s %s, %s", byteSize(r.GetFreedBytes()), byteSize(r.GetUsedBytes()), done, counted(r.GetRemoved(), "build"))
	if n := r.GetShortBytes(); n > 0 {
		a.print.line("%s above %s: nothing more may go", byteSize(n), byteSize(r.GetBudgetBytes()))
	}
	return nil
}

func collectionOf(dryRun bool, r *wire.CollectReply) gcResult {
	out := gcResult{DryRun: dryRun, UsedBytes: r.GetUsedBytes(), ToBytes: r.GetBudgetBytes(), FreedBytes: r.GetFreedBytes(), ShortBytes: r.GetShortBytes(),
		Removed: r.GetRemoved(), Considered: r.GetConsidered(), PlanSeconds: r.GetPlanSeconds(), More: r.GetMore(),
		Removals: []removalResult{}, Kept: []keptResult{}}
	for _, one := range r.GetRemovals() {
		out.Removals = append(out.Removals, removalResult{one.GetBuild(), one.GetModelName(), one.GetEp(), one.GetScope(), one.GetModels(),
			one.GetFreesBytes(), one.GetReason(), one.GetOutcome(), one.GetCompileSeconds(), one.GetLastUsedMs()})
	}
	for _, k := range r.GetKept() {
		out.Kept = append(out.Kept, keptResult{k.GetReason(), k.GetBuilds(), k.GetBytes()})
	}
	return out
}
