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
	More     uint64          `json:"more"` // findings that are not listed
}

type findingResult struct {
	Kind   string   `json:"kind"`
	Object string   `json:"object"`
	Detail string   `json:"detail"`
	Builds []string `json:"builds"`
}

func (a *app) checkCommand() *cobra.Command {
	var quick, deep, space bool
	cmd := &cobra.Command{
		Use:   "check [--quick|--deep|--space]",
		Short: "look for damage in the store",
		Long: `check looks whether everything that is kept is as it was stored. --quick, the default, looks at what must be
there and at times and sizes; --deep reads and hashes every byte. --space compares what the daemon has accounted for with what the file
system says, block by block, and names what makes a difference. It changes nothing. Leftovers and stale views
are reported and are no damage: the daemon deals with them by itself.` + statusHelp(exitDone, exitFailed, exitUsage, exitDamage, exitNoDaemon, exitNotAllowed),
		Example: "  epcachectl check --deep",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if quick && deep || space && (quick || deep) {
				return usageError{errors.New("check: one of --quick, --deep and --space")}
			}
			if space {
				return a.withDaemon(cmd.Context(), a.checkSpace)
			}
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return a.check(ctx, c, &wire.Check{Deep: deep})
			})
		},
	}
	cmd.Flags().BoolVar(&quick, "quick", false, "look at structure, sizes and times (default)")
	cmd.Flags().BoolVar(&space, "space", false, "compare the account of the space with the file system")
	cmd.Flags().BoolVar(&deep, "deep", false, "read and hash every byte")
	return cmd
}

func (a *app) check(ctx context.Context, c *unixsock.Client, request *wire.Check) error {
	reply, err := a.checked(ctx, c, request)
	if err != nil {
		return err
	}
	out := checkResult{Blobs: reply.GetBlobs(), Builds: reply.GetBuilds(), Bytes: reply.GetBytes(), Findings: []findingResult{}, More: reply.GetMore()}
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

// checked shows how far the daemon is with it.
func (a *app) checked(ctx context.Context, c *unixsock.Client, request *wire.Check) (reply *wire.CheckReply, err error) {
	err = a.showing(func(progress func(*wire.Progress)) (err error) {
		reply, err = c.Check(ctx, request, progress)
		return err
	})
	return reply, err
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
	if out.More > 0 {
		a.print.line("and %d more", out.More)
	}
	verdict := "no damage"
	for _, f := range out.Findings {
		if isDamage(f.Kind) {
			verdict = "damage found"
		}
	}
	a.print.line("%s, %s, %s: %s", counted(out.Builds, "build"), counted(out.Blobs, "file"), byteSize(out.Bytes), verdict)
}
