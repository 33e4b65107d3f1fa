package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// checkResult is what check --json prints.
type checkResult struct {
	Blobs    uint64          `json:"blobs"`
	Builds   uint64          `json:"builds"`
	Bytes    int64           `json:"bytes"`
	Findings []findingResult `json:"findings"`
}

type findingResult struct {
	Kind   string   `json:"kind"`
	Object string   `json:"object"`
	Detail string   `json:"detail"`
	Builds []string `json:"builds"`
}

func (a *app) checkCommand() *cobra.Command {
	var quick, deep bool
	cmd := &cobra.Command{
		Use:   "check [--quick|--deep]",
		Short: "look for damage in the store",
		Long: `check looks whether everything that is kept is as it was stored. --quick, the default, looks at what must be
there and at times and sizes; --deep reads and hashes every byte. It changes nothing. Leftovers and stale views
are reported and are no damage: the daemon deals with them by itself.` + statusHelp(exitDone, exitFailed, exitUsage, exitDamage, exitNoDaemon, exitNotAllowed),
		Example: "  epcachectl check --deep",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if quick && deep {
				return usageError{errors.New("check: either --quick or --deep")}
			}
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return a.check(ctx, c, &wire.Check{Deep: deep})
			})
		},
	}
	cmd.Flags().BoolVar(&quick, "quick", false, "look at structure, sizes and times (default)")
	cmd.Flags().BoolVar(&deep, "deep", false, "read and hash every byte")
	return cmd
}

func (a *app) check(ctx context.Context, c *unixsock.Client, request *wire.Check) error {
	reply, err := c.Check(ctx, request)
	if err != nil {
		return err
	}
	out := checkResult{Blobs: reply.GetBlobs(), Builds: reply.GetBuilds(), Bytes: reply.GetBytes(), Findings: []findingResult{}}
	damaged := false
	for _, f := range reply.GetFindings() {
		out.Findings = append(out.Findings, findingResult{f.GetKind(), f.GetObject(), f.GetDetail(), append([]string{}, f.GetBuilds()...)})
		damaged = damaged || isDamage(f.GetKind())
	}
	if a.json {
		err = a.print.json(out)
	} else {
		a.printCheck(out)
	}
	if err == nil && damaged {
		return exitError(exitDamage)
	}
	return err
}

// isDamage takes a kind that is not known for damage: a newer daemon may find more.
func isDamage(kind string) bool { return kind != "leftover" && kind != "stale view" }

func (a *app) printCheck(out checkResult) {
	for _, f := range out.Findings {
		a.print.line("%s %s: %s", printable(f.Kind), printable(f.Object), printable(f.Detail))
		for _, b := range f.Builds {
			a.print.line("  needed by build %s", short(b))
		}
	}
	verdict := "no damage"
	for _, f := range out.Findings {
		if isDamage(f.Kind) {
			verdict = "damage found"
		}
	}
	a.print.line("%s, %s, %s: %s", counted(out.Builds, "build"), counted(out.Blobs, "file"), byteSize(out.Bytes), verdict)
}
