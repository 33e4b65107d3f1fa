package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newKey(a *cli.Call) *cobra.Command {
	g := &acquire.Get{Call: a, Verb: "key"}
	cmd := &cobra.Command{
		Use:   "key MODEL --ep EP[:DEVICE]... [flags]",
		Short: "print a request key and its record",
		Long: `key prints the request key of MODEL, and the request record of which the key is the
digest: the request as the daemon understood it, with defaults left out and values normalised.
Nothing is looked up or compiled. The flags are those of get.` + exit.Help(exit.AskingCodes...),
		Example: "  epcachectl key mobilenet.onnx --ep OpenVINOExecutionProvider --dim batch=1",
		Args:    cli.UsageArgs(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := g.Request.CompleteOrEP(); err != nil {
				return err
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				if err := g.Request.OnlyEP(ctx, c, a.Print); err != nil {
					return exit.WithVerb("key", err)
				}
				reply, err := g.Ask(ctx, c, args[:1], wire.OnMiss_KEY_ONLY)
				switch {
				case err != nil:
					return err
				case reply.GetRequestKey() == "":
					return exit.WithOperation("key", args[0],
						errors.New("it is compiled already, so no build is looked up"))
				case a.JSON:
					return a.Print.JSON(jsonout.Of(reply, "request_key", "model_digest", "record"))
				}
				a.Print.Table([][]string{
					{"request key", reply.GetRequestKey()},
					{"model digest", reply.GetModelDigest()},
					{"record", compactRecord(reply.GetRecord())},
				})
				return nil
			})
		},
	}
	g.Request.AddFlags(cmd)
	return cmd
}
