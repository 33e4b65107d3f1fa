package main

import (
	"context"
	"math"

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
	words := changeWords{done: "withheld", would: "would withhold",
		dryRun: "change nothing, print what would be withheld"}
	return change(a, cmd, words, request, &request.Entries, &request.DryRun)
}

// changeWords are the texts of a verb that changes builds.
type changeWords struct {
	done, would string
	dryRun      string // help of -n
	pinned      string // follows a pinned build
}

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
		return printChange(a, words, *dryRun, reply)
	})
	return cmd
}

func printChange(a *cli.Call, words changeWords, dryRun bool, reply *wire.ChangeReply) error {
	if a.JSON {
		return a.PrintForScripts(dryRun, reply)
	}
	done, freed := words.done, "freed"
	if dryRun {
		done, freed = words.would, "would be freed"
	}
	if len(reply.GetBuilds()) == 0 {
		a.Print.Line("%s nothing: no such builds", done)
	}
	for _, b := range reply.GetBuilds() {
		a.Print.Line("%s %s: %s", done, modelColumn(b), buildOf(b, words.pinned))
	}
	if n := reply.GetMore(); n > 0 {
		a.Print.Line("%s %d more", done, n)
	}
	if n := reply.GetFreedBytes(); n > 0 {
		a.Print.Line("%s %s", term.Bytes(n), freed)
	}
	return nil
}

// buildOf returns the id and the execution provider of a build, and the word if it is pinned.
func buildOf(b *wire.Build, pinned string) string {
	text := "build " + term.Short(b.GetBuild()) + " of " + term.TextOrDash(b.GetEp())
	if b.GetPinned() {
		text += pinned
	}
	return text
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
	words := changeWords{done: "pinned", would: "would pin",
		dryRun: "pin nothing, print what would be pinned"}
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
	words := changeWords{done: "unpinned", would: "would unpin",
		dryRun: "unpin nothing, print what would be unpinned"}
	request := &wire.Unpin{}
	return change(a, cmd, words, request, &request.Entries, &request.DryRun)
}
