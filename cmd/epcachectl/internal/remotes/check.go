package remotes

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// NewCheck returns the verb check.
func NewCheck(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "check NAME",
		Short: "test the operations of a remote",
		Long: `check tests the operations that the daemon needs of a remote: reading, writing,
writes that only create or only replace one version, ranges, listing and the clock. It leaves one
small object there. For an operation that fails it prints the consequence.` +
			exit.Help(exit.AskingCodes...),
		Example: "  epcachectl remote check fleet",
		Args:    cli.UsageArgs(1, 1),
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client, args []string) error {
			reply, err := unixsock.Ask[wire.CheckRemoteReply](ctx, c,
				&wire.CheckRemote{Remote: args[0]}, nil)
			if err != nil {
				return err
			}
			if a.JSON {
				return a.Print.JSON(jsonout.Of(reply))
			}
			rows := [][]string{{"TRIED", "", "SEEN"}}
			for _, f := range reply.GetFindings() {
				can := "yes"
				if !f.GetOk() {
					can = "no"
				}
				rows = append(rows, []string{term.Printable(f.GetName()), can,
					term.Printable(f.GetText())})
			}
			a.Print.Table(rows)
			return nil
		}),
	}
}

// ReadKeys reads a file of public keys.
func ReadKeys(file string) ([]*portable.Key, error) {
	text, err := portable.ReadFile(file, portable.MaxPEM)
	if err != nil {
		return nil, exit.WithOperation("read", file, err)
	}
	keys, err := portable.ParseKeys(file, text)
	if err != nil {
		return nil, exit.Usage(err)
	}
	return keys, nil
}
