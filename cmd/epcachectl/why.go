package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/modelname"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newWhy(a *cli.Call) *cobra.Command {
	g := &acquire.Get{Call: a, Verb: "why"}
	r := &g.Request
	var all, share, key bool
	cmd := &cobra.Command{
		Use:   "why MODEL --ep EP[:DEVICE]... [flags] | why ENTRY",
		Short: "explain a decision field by field",
		Long: `why MODEL with the flags of get explains what get would do: the builds for this
request, their compatibility and the evidence for it, the closest other entries with the fields
that differ, and the entry's history. Nothing is compiled or changed.

why ENTRY explains an existing entry. ENTRY is as for show; a model's file without --ep means all
that is stored of it. Only fields that differ are printed; --all prints every field. --share
explains two or more models as one weight-sharing group, as get --share requests it.

--key prints the request key of MODEL, and the request record of which the key is the digest: the
request as the daemon understood it, with defaults left out and values normalised. Nothing is
looked up.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage,
				exit.NoDaemon, exit.Stale, exit.NotAllowed) + `

Status 0 means that a build is served, 3 that there is none (get would compile).`,
		Example: `  epcachectl why mobilenet.onnx --ep OpenVINOExecutionProvider:CPU --dim batch=1
  epcachectl why --share prefill.onnx decode.onnx --ep QNNExecutionProvider
  epcachectl why mobilenet.onnx --ep OpenVINOExecutionProvider --dim batch=1 --key
  epcachectl why 3f2a9c01`,
		Args: cli.UsageArgs(1, math.MaxInt),
		RunE: func(cmd *cobra.Command, args []string) error {
			if share != (len(args) > 1) {
				return exit.Usagef("why: one model or entry, or --share and the models of a group")
			}
			if key && (share || all) {
				return exit.Usagef("why: --key is of one model, without --share and --all")
			}
			asked := share || key || slices.ContainsFunc(r.FlagNames(), cmd.Flags().Changed)
			if asked {
				complete := r.Complete
				if key {
					complete = r.CompleteOrEP
				}
				if err := complete(); err != nil {
					return err
				}
			}
			if key {
				return a.WithDaemon(cmd.Context(), func(ctx context.Context,
					c *unixsock.Client) error {
					return printKey(ctx, c, args[0], g)
				})
			}
			return a.WithReader(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				e, err := explanation(ctx, c, args, g, asked)
				if err != nil {
					return err
				}
				return printWhy(a, args[0], e, all)
			})
		},
	}
	r.AddFlags(cmd)
	cmd.Flags().BoolVar(&share, "share", false, "explain the models as one weight-sharing group")
	cmd.Flags().BoolVar(&key, "key", false, "only print the request key and its record")
	cmd.Flags().BoolVar(&all, "all", false, "print every field, not only those that differ")
	return cmd
}

func explanation(ctx context.Context, c *unixsock.Client, args []string, g *acquire.Get,
	asked bool) (*wire.Explanation, error) {
	arg := args[0]
	if !asked {
		entry, err := modelfile.Entry(ctx, arg)
		if err != nil {
			return nil, exit.WithOperation("why", arg, err)
		}
		e, err := unixsock.Ask[wire.Explanation](ctx, c, &wire.Why{Entry: entry}, nil)
		path, wrong := filepath.Abs(arg)
		none := errors.Is(err, unixsock.ErrNotFound)
		if none && wrong == nil && entry != arg {
			// By name, because the history of removed builds has no digests of models.
			name := modelname.Of(path, filepath.Base(path))
			past, _ := unixsock.Ask[wire.Explanation](ctx, c, &wire.Why{Entry: name}, nil)
			if past.GetDecision() == "gone" {
				return past, nil
			}
		}
		if entry != arg && (none || errors.Is(err, unixsock.ErrBadRequest)) {
			err = exit.Hint(modelfile.AsGiven(err, []string{arg}, []string{entry}),
				"ask what get would do: epcachectl why "+term.Printable(arg)+" --ep EP")
		}
		if err != nil {
			return nil, exit.WithOperation("why", arg, err)
		}
		return e, nil
	}
	reply, err := g.Ask(ctx, c, args, wire.OnMiss_EXPLAIN)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, exit.Hint(err, "for a stored entry, omit the flags: epcachectl why "+
				""+term.Printable(term.Brief(arg)))
		}
		return nil, err
	}
	if e := reply.GetExplanation(); e != nil {
		return e, nil
	}
	if reply.GetOutcome() == "passthrough" {
		return &wire.Explanation{Decision: "passthrough", Reason: reply.GetWhy(),
			RequestKey: reply.GetRequestKey()}, nil
	}
	return nil, exit.WithOperation("why", arg, errors.New("the daemon cannot explain: it is "+
		"older than this program"))
}

// printKey prints the request key of a model, and its record.
func printKey(ctx context.Context, c *unixsock.Client, model string, g *acquire.Get) error {
	if err := g.Request.OnlyEP(ctx, c, g.Print); err != nil {
		return exit.WithVerb("why", err)
	}
	reply, err := g.Ask(ctx, c, []string{model}, wire.OnMiss_KEY_ONLY)
	switch {
	case err != nil:
		return err
	case reply.GetRequestKey() == "":
		return exit.WithOperation("why", model,
			errors.New("it is compiled already, so no build is looked up"))
	case g.JSON:
		return g.Print.JSON(jsonout.Of(reply, "request_key", "model_digest", "record"))
	}
	g.Print.Table([][]string{
		{"request key", reply.GetRequestKey()},
		{"model digest", reply.GetModelDigest()},
		{"record", compactRecord(reply.GetRecord())},
	})
	return nil
}

func printWhy(a *cli.Call, arg string, e *wire.Explanation, all bool) error {
	if a.JSON {
		if err := a.Print.JSON(jsonout.Of(e)); err != nil {
			return err
		}
	} else if err := printExplanation(a.Print, arg, e, all); err != nil {
		return err
	}
	decision, known := decisionTexts[e.GetDecision()]
	switch {
	case !known: // unknown to this program, but not to a newer daemon
		return exit.Status(exit.Failed)
	case decision.code != exit.Done:
		return exit.Status(decision.code)
	}
	return nil
}

// decisionTexts has for each decision a sentence, and an exit code for scripts.
var decisionTexts = map[string]struct {
	sentence string
	code     int
}{
	"hit":         {"%s is served from the cache", exit.Done},
	"miss":        {"%s would be compiled", exit.NotFound},
	"stale":       {"%s has a build that must not be loaded", exit.Stale},
	"passthrough": {"%s is compiled already", exit.Done},
	"current":     {"%s is stored, and served to fitting requests", exit.Done},
	"withheld":    {"%s is stored, and withheld", exit.Stale},
	"damaged":     {"%s is damaged", exit.Damage},
	"gone":        {"%s had a build, which was removed", exit.NotFound},
	"failed":      {"%s failed to compile, and is not retried now", exit.Failed},
}

func printExplanation(p *term.Printer, arg string, e *wire.Explanation, all bool) error {
	sentence := cmp.Or(decisionTexts[e.GetDecision()].sentence,
		"%s: "+term.Printable(e.GetDecision()))
	p.Line("%s", fmt.Sprintf(sentence, term.Printable(term.Brief(arg)))+term.WithPrefix(": ",
		e.GetReason()))
	rows := [][]string{}
	if e.GetRequestKey() != "" {
		rows = append(rows, []string{"  request key", term.Printable(e.GetRequestKey())})
	}
	if e.GetRuntime() != "" {
		rows = append(rows, []string{"  runtime", term.Printable(e.GetRuntime())})
	}
	p.Table(rows)
	if all {
		if err := printRecord(p, e.GetRecord()); err != nil {
			return err
		}
	}
	for _, c := range e.GetCandidates() {
		printCandidate(p, c, e.GetReason(), all)
	}
	for i, n := range e.GetNeighbours() {
		if i == 0 {
			p.Line("\nnearest entries:")
		}
		p.Line("  %s, request key %s, %s, differs in %s", term.TextOrDash(n.GetModelName()),
			term.Printable(term.Short(n.GetRequestKey())), term.Count(int(n.GetBuilds()), "build"),
			term.Count(len(n.GetDifferences()), "field"))
		printDifferences(p, "    ", "requested", "there", n.GetDifferences())
	}
	for i, line := range e.GetRemotes() {
		if i == 0 && e.GetDecision() == "hit" {
			break // no remotes
		}
		p.Line("  %s", term.Printable(line))
	}
	for i, event := range e.GetHistory() {
		if i == 0 {
			p.Line("\nhistory:")
		}
		p.Line("  %s", eventLine(p, event))
	}
	return nil
}

// printCandidate prints a build. A reason that was printed already, said, is not repeated.
func printCandidate(p *term.Printer, c *wire.Candidate, said string, all bool) {
	b := c.GetBuild()
	verb := "not served"
	if c.GetServed() {
		verb = "served"
	}
	if reason := cmp.Or(c.GetReason(), "-"); reason != said {
		verb += term.WithPrefix(": ", reason)
	}
	p.Line("\nbuild %s is %s", term.Printable(term.Short(b.GetBuild())), verb)
	if text := b.GetCompatibilityReason(); text == said || text == c.GetReason() {
		b = proto.CloneOf(b)
		b.CompatibilityReason = ""
	}
	if all {
		printBuild(p, b, "")
	} else {
		p.Table([][]string{
			{"  compatibility", judgement(p, b)},
			{"  made by", term.TextOrDash(b.GetEp()) + " " + term.TextOrDash(b.GetEpVersion()) +
				term.WithPrefix(", SDK ", b.GetSdkVersion()) + term.WithPrefix(", hardware ",
				b.GetHardwareArchitecture()) +
				term.WithPrefix(", driver ", b.GetDriverVersion()) +
				term.WithPrefix(", ONNX Runtime ", b.GetOrtVersion())},
			{"  created", createdText(p, b)},
			{"  state", stateOf(b)},
			{"  kept", keptText(b)},
			{"  gain", gain(b)},
		})
	}
	printDifferences(p, "  ", "now", "made with", c.GetDifferences())
}

func printDifferences(p *term.Printer, indent, asked, found string, list []*wire.Difference) {
	if len(list) == 0 {
		return
	}
	rows := [][]string{{indent + "FIELD", strings.ToUpper(asked), strings.ToUpper(found)}}
	for _, d := range list {
		rows = append(rows, []string{indent + term.Printable(d.GetField()),
			fieldValue(d.GetAsked()), fieldValue(d.GetFound())})
	}
	p.Table(rows)
}

func fieldValue(v string) string { return cmp.Or(term.Printable(term.Brief(v)), "(missing)") }

func printRecord(p *term.Printer, record string) error {
	var tree any
	if record == "" {
		return nil
	}
	if err := json.Unmarshal([]byte(record), &tree); err != nil {
		return fmt.Errorf("request record: %w", err)
	}
	rows := [][]string{{"  FIELD", "REQUESTED"}}
	eachLeaf("", tree, func(field, value string) {
		rows = append(rows, []string{"  " + term.Printable(field), fieldValue(value)})
	})
	p.Line("")
	p.Table(rows)
	return nil
}

// eachLeaf calls leaf for the leaves of a record, with names as in differences:
// "execution_providers[0].options.precision".
func eachLeaf(path string, v any, leaf func(field, value string)) {
	switch v := v.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			eachLeaf(strings.TrimPrefix(path+"."+key, "."), v[key], leaf)
		}
	case []any:
		for i, one := range v {
			eachLeaf(fmt.Sprintf("%s[%d]", path, i), one, leaf)
		}
	case string:
		leaf(path, v)
	default:
		text, _ := json.Marshal(v) // cannot fail for numbers and booleans
		leaf(path, string(text))
	}
}
