package main

import (
	"context"
	"math"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newInvalidate(a *cli.Call) *cobra.Command {
	request := &wire.Invalidate{}
	cmd := &cobra.Command{
		Use:   "invalidate ENTRY|MODEL... [--reason TEXT]",
		Short: "withhold builds until they are recompiled",
		Long: `invalidate withholds all builds of the entries: they are no longer served, and
the next request recompiles. Programs that have loaded them are not affected. ENTRY is as for show.

With -n it prints what would be withheld.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl invalidate mobilenet.onnx --reason "wrong results on the new ` +
			`driver"`,
	}
	cmd.Flags().StringVar(&request.Reason, "reason", "", "record `TEXT` as the reason")
	words := changeWords{"withheld", "would withhold",
		"change nothing, print what would be withheld"}
	return change(a, cmd, words, request, &request.Entries, &request.DryRun)
}

// changeWords are the texts of a verb that changes builds: what it did, what it would do, and for
// -n.
type changeWords struct{ done, would, dryRun string }

// change completes a command that changes all builds of the given entries. entries and dryRun are
// fields of the request.
func change(a *cli.Call, cmd *cobra.Command, words changeWords, request proto.Message,
	entries *[]string, dryRun *bool) *cobra.Command {
	cmd.Flags().BoolVarP(dryRun, "dry-run", "n", false, words.dryRun)
	cmd.Args = cli.UsageArgs(1, math.MaxInt)
	cmd.RunE = a.RunWithEntries(func(ctx context.Context, c *unixsock.Client,
		args []string) (err error) {
		if *entries, err = modelfile.Entries(ctx, args); err != nil {
			return err
		}
		reply, err := unixsock.Ask[wire.ChangeReply](ctx, c, request, nil)
		if err != nil {
			return exit.WithVerb(cmd.Name(), modelfile.AsGiven(err, args, *entries))
		}
		return printChange(a, words.done, words.would, *dryRun, reply)
	})
	return cmd
}

func printChange(a *cli.Call, done, would string, dryRun bool, reply *wire.ChangeReply) error {
	if a.JSON {
		return a.PrintForScripts(dryRun, reply)
	}
	freed := "freed"
	if dryRun {
		done, freed = would, "would be freed"
	}
	if len(reply.GetBuilds()) == 0 {
		a.Print.Line("%s nothing: no such builds", done)
	}
	for _, b := range reply.GetBuilds() {
		a.Print.Line("%s %s: build %s of %s%s", done, modelColumn(b), term.Short(b.GetBuild()),
			term.TextOrDash(b.GetEp()), pinnedWord(b, done))
	}
	if n := reply.GetMore(); n > 0 {
		a.Print.Line("%s %d more", done, n)
	}
	if n := reply.GetFreedBytes(); n > 0 {
		a.Print.Line("%s %s", term.Bytes(n), freed)
	}
	return nil
}

func pinnedWord(b *wire.Build, done string) string {
	if b.GetPinned() && strings.Contains(done, "delete") {
		return ", pinned"
	}
	return ""
}

func newPin(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pin ENTRY|MODEL...",
		Short: "protect builds from eviction",
		Long: `pin protects all builds of the entries from eviction, however full the store is and
however long they are unused. A build that replaces a pinned one is pinned too. rm removes pinned
builds as well. ENTRY is as for show.

With -n it prints what would be pinned.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl pin mobilenet.onnx`,
	}
	words := changeWords{"pinned", "would pin", "pin nothing, print what would be pinned"}
	request := &wire.Pin{}
	return change(a, cmd, words, request, &request.Entries, &request.DryRun)
}

func newUnpin(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "unpin ENTRY|MODEL...",
		Short: "end the protection from eviction",
		Long: `unpin lets the daemon evict pinned builds of the entries again. It succeeds for
builds that are not pinned. ENTRY is as for show.

With -n it prints what would be unpinned.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl unpin mobilenet.onnx`,
	}
	words := changeWords{"unpinned", "would unpin", "unpin nothing, print what would be unpinned"}
	request := &wire.Unpin{}
	return change(a, cmd, words, request, &request.Entries, &request.DryRun)
}
