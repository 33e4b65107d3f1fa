package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newRepair(a *cli.Call) *cobra.Command {
	var dryRun, quick bool
	var request wire.Check
	cmd := &cobra.Command{
		Use:   "repair [-n] [--quick] [--rebuild-index]",
		Short: "quarantine damage and recompile what it affects",
		Long: `repair reads and hashes every byte of the store, as check --deep does, and repairs
what it finds. With -n it changes nothing, and prints what it would do.

Damaged and unreadable files are moved into the quarantine, never deleted. Their builds are withheld
and recompiled: at once if the daemon can open the source model, otherwise by the next request.
Unreferenced blobs are removed. A lost journal is restored from memory.

--rebuild-index rebuilds the index from the manifests and the journal, which repair does by itself
if they differ. The daemon reopens the store for that, and cancels the running requests. Counters
and times of last use are lost; builds are not.` +
			exit.Help(exit.CheckingCodes...),
		Example: `  epcachectl repair -n
  epcachectl repair
  epcachectl repair --quick --rebuild-index`,
		Args: cli.UsageArgs(0, 0),
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client, _ []string) error {
			request.Repair, request.Deep = !dryRun, !quick
			return repair(ctx, a, c, &request)
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&dryRun, "dry-run", "n", false, "change nothing, print what would be done")
	f.BoolVar(&quick, "quick", false, "check structure, sizes and times, and hash nothing")
	f.BoolVar(&request.RebuildIndex, "rebuild-index", false,
		"rebuild the index from manifests and journal")
	return cmd
}

func repair(ctx context.Context, a *cli.Call, c *unixsock.Client, request *wire.Check) error {
	r, err := cli.AskWithProgress[wire.CheckReply](ctx, a, c, request)
	if err != nil {
		return err
	}
	done, left, reopens := 0, 0, false
	for _, f := range r.GetFindings() {
		switch action := f.GetAction(); {
		case action == "" && f.GetKind() != "leftover", strings.HasPrefix(action, "failed: "):
			left++
		case action != "" && !strings.HasPrefix(action, nothingLeft):
			done++
		}
		reopens = reopens || f.GetKind() == "index"
	}
	verb, verdict := "done", "repaired"
	if !request.Repair {
		verb, verdict, left = "would do", "would be repaired", left+done
	}
	if a.JSON {
		out := jsonout.Of(r, "blobs", "builds", "bytes", "findings", "more")
		out["dry_run"], out["repaired"] = !request.Repair, done
		err = a.Print.JSON(out)
	} else {
		printStoreFindings(a.Print, r.GetFindings(), verb)
		a.Print.More(r.GetMore())
		a.Print.Line("%s, %s, %s: %s %s", term.Count(r.GetBuilds(), "build"),
			term.Count(r.GetBlobs(), "file"), term.Bytes(r.GetBytes()),
			term.Count(done, "finding"), verdict)
	}
	if reopens && request.Repair && err == nil {
		err = waitForReopening(ctx, a, c)
	}
	if err == nil && left > 0 {
		err = exit.Status(exit.Damage)
	}
	return err
}

// waitForReopening returns when the daemon has opened its store again, and shows its progress.
func waitForReopening(ctx context.Context, a *cli.Call, c *unixsock.Client) error {
	_ = c.Subscribe(ctx, func(*wire.Event) error { return nil }) // returns when the connection ends
	again, err := a.Reconnect(ctx)
	if err != nil {
		return err
	}
	if _, err = unixsock.Ask[wire.StatusReply](ctx, again, &wire.Status{}, nil); err != nil {
		a.Print.Note("not done yet: " + err.Error())
	}
	return again.Close()
}
