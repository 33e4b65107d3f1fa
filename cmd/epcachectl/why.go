package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) whyCommand() *cobra.Command {
	var r request
	var all bool
	cmd := &cobra.Command{
		Use:   "why MODEL --ep EP[:DEVICE]... [flags] | why ENTRY",
		Short: "explain a decision, field by field",
		Long: `why MODEL with the flags of get says what get would do and why: which builds there are for exactly this request, what
each is good for and who says so, the entries most like it and the fields in which they differ, and what has happened to the
entry. Nothing is compiled or changed. why ENTRY explains an entry that there is; ENTRY is as for show, and a model's file
without --ep stands for what is kept of it.

Only fields that differ are printed; --all prints every field of the request, and everything about each build.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage, exit.NoDaemon, exit.Stale, exit.NotAllowed) + `
Done means that there is a build which is served, not found that there is none (get would compile).`,
		Example: `  epcachectl why mobilenet.onnx --ep OpenVINOExecutionProvider:CPU --dim batch=1
  epcachectl why 3f2a9c01`,
		Args: cli.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			asked := false
			for _, name := range r.flagNames() {
				asked = asked || cmd.Flags().Changed(name)
			}
			if asked {
				if err := r.complete(); err != nil {
					return err
				}
			}
			return a.WithReader(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				e, err := a.explanation(ctx, c, args[0], &r, asked)
				if err != nil {
					return err
				}
				return a.printWhy(args[0], e, all)
			})
		},
	}
	r.addFlags(cmd)
	cmd.Flags().BoolVar(&all, "all", false, "print every field, not only those that differ")
	return cmd
}

// explanation asks for a request's decision, or for an entry's state.
func (a *app) explanation(ctx context.Context, c *unixsock.Client, arg string, r *request, asked bool) (*wire.Explanation, error) {
	if !asked {
		entry, err := modelfile.Entry(ctx, arg)
		if err != nil {
			return nil, exit.Failing("why", arg, err)
		}
		e, err := c.Why(ctx, &wire.Why{Entry: entry})
		if err != nil {
			return nil, exit.Failing("why", arg, withoutEP(arg, err))
		}
		return e, nil
	}
	g := getCall{app: a, verb: "why", request: *r}
	show := term.NewPhases(a.Print, false, 1)
	result := g.acquire(ctx, c, arg, wire.OnMiss_EXPLAIN, show)
	show.End()
	defer closeViews([]got{result})
	if result.err != nil {
		if errors.Is(result.err, fs.ErrNotExist) {
			return nil, exit.Hint(result.err, "of an entry, give no flags of a request: epcachectl why "+term.Printable(term.Brief(arg)))
		}
		return nil, result.err
	}
	if e := result.reply.GetExplanation(); e != nil {
		return e, nil
	}
	if result.reply.GetOutcome() == "passthrough" {
		return &wire.Explanation{Decision: "passthrough", Reason: result.reply.GetWhy(), RequestKey: result.reply.GetRequestKey()}, nil
	}
	return nil, exit.Failing("why", arg, errors.New("the daemon explains nothing: it is older than this program"))
}

// withoutEP tells who named a file that nothing is kept of how to ask about a request.
func withoutEP(arg string, err error) error {
	if _, statErr := os.Stat(arg); statErr == nil && errors.Is(err, unixsock.ErrNotFound) {
		return exit.Hint(err, "ask what get would do: epcachectl why "+term.Printable(arg)+" --ep EP")
	}
	return err
}

func (a *app) printWhy(arg string, e *wire.Explanation, all bool) error {
	var err error
	if a.JSON {
		err = a.Print.JSON(jsonout.Of(e))
	} else {
		err = printExplanation(a.Print, arg, e, all)
	}
	if code := decisionCode(e.GetDecision()); err == nil && code != exit.Done {
		return exit.Status(code)
	}
	return err
}

// decisionCode makes a decision something that scripts can branch on.
func decisionCode(decision string) int {
	switch decision {
	case "hit", "passthrough", "current":
		return exit.Done
	case "miss", "gone":
		return exit.NotFound
	case "stale", "withheld":
		return exit.Stale
	case "damaged":
		return exit.Damage
	}
	return exit.Failed // of a daemon that knows more
}

// decided is the sentence that says it all.
func decided(arg string, e *wire.Explanation) string {
	name := term.Printable(term.Brief(arg))
	sentence := map[string]string{
		"hit":         "%s is served from the cache",
		"miss":        "%s would be compiled",
		"stale":       "%s has a build that must not be loaded",
		"passthrough": "%s is compiled already",
		"current":     "%s is kept and served to requests that it fits",
		"withheld":    "%s is kept and withheld",
		"damaged":     "%s is damaged",
		"gone":        "%s had a build, which is gone",
		"failed":      "%s failed to compile, and is not compiled now",
	}[e.GetDecision()]
	if sentence == "" {
		sentence = "%s: " + term.Printable(e.GetDecision())
	}
	text := fmt.Sprintf(sentence, name)
	if e.GetReason() != "" {
		text += ": " + term.Printable(e.GetReason())
	}
	return text
}
