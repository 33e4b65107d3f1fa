package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newCheck(a *cli.Call) *cobra.Command {
	var quick bool
	var request wire.Check
	cmd := &cobra.Command{
		Use:   "check [--quick|--deep|--space]",
		Short: "check the store for damage",
		Long: `check verifies the files of the store, and changes nothing; see repair. The exit
status says whether damage was found. Leftovers and stale views are reported, but are not damage,
because the daemon removes them by itself.

--quick, the default, checks that files exist, their sizes and times. --deep reads and hashes every
byte. --space compares the account of bytes with the file system, block by block.` +
			exit.Help(exit.CheckingCodes...),
		Example: "  epcachectl check --deep",
		Args:    cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if r := &request; quick && r.Deep || r.Space && (quick || r.Deep) {
				return exit.Usagef("check: one of --quick, --deep and --space")
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return check(ctx, a, c, &request)
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&quick, "quick", false, "check structure, sizes and times (default)")
	f.BoolVar(&request.Space, "space", false, "compare the account of space with the file system")
	f.BoolVar(&request.Deep, "deep", false, "read and hash every byte")
	return cmd
}

func check(ctx context.Context, a *cli.Call, c *unixsock.Client, request *wire.Check) error {
	reply, err := cli.AskWithProgress[wire.CheckReply](ctx, a, c, request)
	if err != nil {
		return err
	}
	report := reportFindings
	if request.Space {
		report = reportSpace
	}
	damaged, err := report(a, reply)
	if err == nil && damaged {
		return exit.Status(exit.Damage)
	}
	return err
}

// reportFindings prints the findings, and reports whether any is damage.
func reportFindings(a *cli.Call, r *wire.CheckReply) (damaged bool, err error) {
	damaged = slices.ContainsFunc(r.GetFindings(), needsRepair)
	if a.JSON {
		return damaged, a.Print.JSON(jsonout.Of(r, "blobs", "builds", "bytes", "findings", "more"))
	}
	printStoreFindings(a.Print, r.GetFindings(), "")
	a.Print.More(r.GetMore())
	verdict := "no damage"
	if damaged {
		verdict = "damage found: epcachectl repair -n shows what a repair would do"
	}
	a.Print.Line("%s, %s, %s: %s", term.Count(r.GetBuilds(), "build"),
		term.Count(r.GetBlobs(), "file"), term.Bytes(r.GetBytes()), verdict)
	return damaged, nil
}

// needsRepair reports whether a finding is damage that is not repaired yet. An unknown kind counts
// as damage, because a newer daemon may find more kinds.
func needsRepair(f *wire.Finding) bool {
	return f.GetKind() != "leftover" && f.GetKind() != "stale view" &&
		!strings.HasPrefix(f.GetAction(), nothingLeft)
}

// nothingLeft is the prefix of the action for damage that the daemon has handled; the reason
// follows.
const nothingLeft = "none: "

// printStoreFindings prints findings. Unless action is "", it adds the action of repair.
func printStoreFindings(p *term.Printer, list []*wire.Finding, action string) {
	for _, f := range list {
		p.Line("%s %s: %s", term.Printable(f.GetKind()), term.Printable(f.GetObject()),
			term.Printable(f.GetDetail()))
		for _, b := range f.GetBuilds() {
			p.Line("  needed by build %s", term.Short(b))
		}
		if why, dealt := strings.CutPrefix(f.GetAction(), nothingLeft); dealt {
			p.Line("  nothing is left to repair: %s", term.Printable(why))
		} else if action != "" {
			p.Line("  %s: %s", action, cmp.Or(term.Printable(f.GetAction()), "nothing"))
		}
	}
}

// reportSpace prints the account, and reports whether it differs from the file system.
func reportSpace(a *cli.Call, r *wire.CheckReply) (differs bool, err error) {
	all, verdict := int64(0), "is"
	rows := [][]string{{"WHAT", "FILES", "ON DISK", "ACCOUNTED"}}
	for _, l := range r.GetSpace() {
		all += l.GetDiskBytes()
		accounted := "-"
		if l.AccountedBytes != nil {
			accounted = term.Bytes(l.GetAccountedBytes())
			if d := l.GetAccountedBytes() - l.GetDiskBytes(); d != 0 {
				accounted += fmt.Sprintf(", a difference of %d bytes", d)
				differs, verdict = true, "differs from"
			}
		}
		rows = append(rows, []string{term.Printable(l.GetName()), fmt.Sprint(l.GetFiles()),
			term.Bytes(l.GetDiskBytes()), accounted})
	}
	if a.JSON {
		out := jsonout.Of(r, "space", "findings")
		out["disk_bytes"] = all
		return differs, a.Print.JSON(out)
	}
	a.Print.Table(append(rows, []string{"all", "", term.Bytes(all), ""}))
	printStoreFindings(a.Print, r.GetFindings(), "")
	a.Print.Line("the account of space %s the file system", verdict)
	return differs, nil
}
