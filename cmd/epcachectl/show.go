package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newShow(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "show ENTRY|MODEL",
		Short: "show the details of an entry",
		Long: `show prints all builds of an entry: the request, what made each build, its
compatibility and the evidence for it, how fast it loads, its files, state and history.

ENTRY is a request key, a build key or a model digest, the first 8 or more digits of one, or a
model's name. If a file of that name exists, its digest is computed and used.` +
			exit.Help(exit.AskingCodes...),
		Example: `  epcachectl show mobilenet.onnx
  epcachectl show 3f2a9c01`,
		Args: cli.UsageArgs(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithReader(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				entry, err := modelfile.Entry(ctx, args[0])
				if err != nil {
					return exit.WithOperation("show", args[0], err)
				}
				return show(ctx, a, c, args[0], entry)
			})
		},
	}
}

func show(ctx context.Context, a *cli.Call, c *unixsock.Client, arg, entry string) error {
	reply, err := unixsock.Ask[wire.ShowReply](ctx, c, &wire.Show{Entry: entry}, nil)
	if err != nil {
		return exit.WithOperation("show", arg,
			modelfile.AsGiven(err, []string{arg}, []string{entry}))
	}
	if a.JSON {
		out, builds := jsonout.Of(reply, "history", "more"), jsonout.List(reply.GetBuilds())
		for i, record := range reply.GetRecords()[:min(len(reply.GetRecords()), len(builds))] {
			builds[i].(jsonout.Object)["record"] = jsonout.Record(record)
		}
		out["builds"] = builds
		return a.Print.JSON(out)
	}
	for i, b := range reply.GetBuilds() {
		record := ""
		if i < len(reply.GetRecords()) {
			record = reply.GetRecords()[i]
		}
		printBuild(a.Print, b, record)
	}
	if n := reply.GetMore(); n > 0 {
		a.Print.Line("%s more: epcachectl list --model %s", term.Count(n, "build"),
			term.Printable(term.Brief(entry)))
	}
	for _, event := range reply.GetHistory() {
		a.Print.Line("history: %s", term.Printable(event))
	}
	return nil
}

// createdText says when a build was stored, and how long its compile took.
func createdText(p *term.Printer, b *wire.Build) string {
	where := ", compiled in "
	if b.GetImported() != nil {
		where = ", from another machine, compiled there in "
	}
	return p.When(b.GetCreatedMs()) + where + term.Seconds(b.GetCompileSeconds())
}

func printBuild(p *term.Printer, b *wire.Build, record string) {
	rows := [][]string{
		{"build", b.GetBuild()},
		{"request key", b.GetRequestKey()},
		{"model", term.TextOrDash(b.GetModelName())},
		{"path", term.TextOrDash(b.GetModelPath())},
		{"model digest", b.GetModelDigest()},
		{"ep", term.TextOrDash(b.GetEp() + " " + b.GetEpVersion())},
		{"ep library", b.GetEpLibraryDigest()},
		{"sdk version", term.TextOrDash(b.GetSdkVersion())},
		{"hardware", term.TextOrDash(b.GetHardwareArchitecture())},
		{"compatibility", judgement(p, b)},
		{"compatibility string", term.TextOrDash(b.GetCompatibilityString())},
		{"driver", term.TextOrDash(b.GetDriverVersion())},
		{"onnx runtime", term.TextOrDash(b.GetOrtVersion())},
		{"scope", term.TextOrDash(b.GetScope())},
		{"created", createdText(p, b)},
		{"last used", p.When(b.GetLastUsedMs()) + ", " + term.Count(b.GetHits(), "hit")},
		{"state", stateOf(b)},
		{"space", term.Bytes(sizeOf(b)) + "; its removal would free " +
			term.Bytes(b.GetOwnBytes()) + " on the disk"},
		{"kept", keptText(b)},
		{"load check", term.TextOrDash(b.GetLoadCheck())},
		{"gain", gain(b)},
	}
	if from := b.GetImported(); from != nil {
		how := []string{"imported", ""}
		if remote := from.GetRemote(); remote != "" {
			how = []string{"fetched", "from remote " + term.Printable(remote) + ", "}
		}
		rows = append(rows, []string{how[0], how[1] + "signed by " + term.Printable(from.GetKey()) +
			term.WithPrefix(", made by ", from.GetBuilder()) + ", manifest sha256:" +
			term.Printable(from.GetManifest())})
	} else if by := b.GetMadeBy(); by != "" {
		rows = append(rows, []string{"compiled by",
			term.Printable(by) + ", with libraries of its own"})
	}
	if from := b.GetConvertedFrom(); from != "" {
		rows = append(rows, []string{"converted from", from})
	}
	if most := b.GetVerifiedOutput(); most > 0 {
		rows = append(rows, []string{"output", fmt.Sprintf("as the model's, within %g", most)})
	}
	for i, m := range b.GetMembers() {
		rows = append(rows, []string{fmt.Sprintf("model %d", i+1), term.Printable(m.GetName()) +
			"  " + m.GetModelDigest() + "  " + term.Printable(m.GetGraph())})
	}
	for _, f := range b.GetFiles() {
		rows = append(rows, []string{"file",
			term.Printable(f.GetName()) + "  " + term.Bytes(f.GetSize()) + "  " + f.GetDigest()})
	}
	if record != "" {
		rows = append(rows, []string{"request", compactRecord(record)})
	}
	p.Table(rows)
	p.Line("")
}

func keptText(b *wire.Build) string {
	return cmp.Or(term.Printable(b.GetKeptText()), term.TextOrDash(b.GetKeptAs()))
}

func compactRecord(record string) string {
	compact, err := json.Marshal(json.RawMessage(record))
	if err != nil {
		return term.Printable(record)
	}
	return term.Printable(string(compact))
}

func stateOf(b *wire.Build) string {
	text := term.TextOrDash(b.GetState()) + term.WithPrefix(": ", b.GetReason())
	if b.GetLeases() > 0 {
		text += ", in use"
	}
	if b.GetPinned() {
		text += ", pinned"
	}
	return text
}

// judgement prints a build's compatibility in one line: verdict, evidence, time and runtime.
func judgement(p *term.Printer, b *wire.Build) string {
	if b.GetCompatibility() == "" {
		return "not judged yet"
	}
	text := verdict(b.GetCompatibility())
	switch source := b.GetCompatibilitySource(); source {
	case "":
	case "same library":
		text += ", the library is the same"
	case "put":
		text += ", the client compiled it itself"
	case "execution provider", "fingerprint":
		text += ", says the " + source
	case "load check":
		text += ", says a load check"
	default:
		text += ", says " + term.Printable(source) // "rule NAME"
	}
	text += term.WithPrefix(", for ", b.GetCompatibilityRuntime())
	if b.GetJudgedMs() != 0 {
		text += ", " + p.When(b.GetJudgedMs())
	}
	return text + term.WithPrefix(": ", b.GetCompatibilityReason())
}

// verdict spells ONNX Runtime's verdicts with spaces.
func verdict(word string) string {
	return term.Printable(strings.ReplaceAll(word, "_", " "))
}

// gain compares the processor time of loading the build with that of its source.
func gain(b *wire.Build) string {
	load, source := b.GetLoadSeconds(), b.GetSourceLoadSeconds()
	switch {
	case load <= 0 || source <= 0:
		return "not measured"
	case load > source:
		return "the compiled form loads slower than the source: " + term.Seconds(load) +
			" of processor time, the source " + term.Seconds(source)
	}
	return "loads in " + term.Seconds(load) + " of processor time, the source in " +
		term.Seconds(source)
}

func gainColumn(b *wire.Build) string {
	load, source := b.GetLoadSeconds(), b.GetSourceLoadSeconds()
	switch {
	case load <= 0 || source <= 0:
		return "-"
	case load > source:
		return fmt.Sprintf("%.1fx slower", load/source)
	}
	return fmt.Sprintf("%.1fx", source/load)
}

func sizeOf(b *wire.Build) (size int64) {
	for _, f := range b.GetFiles() {
		size += f.GetSize()
	}
	return size
}
