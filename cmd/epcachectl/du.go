package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

type duModel struct {
	name, digest string
	logical, own int64
	// shared counts bytes that several of its builds share once.
	shared int64
	builds []*wire.BuildUsage
}

func (m *duModel) json() jsonout.Object {
	builds := make([]jsonout.Object, len(m.builds))
	for i, one := range m.builds {
		builds[i] = jsonout.Of(one, "shapes", "logical_bytes", "own_bytes", "shared_bytes")
		b := one.GetBuild()
		maps.Copy(builds[i], jsonout.Of(b, "build", "ep", "scope", "state", "pinned",
			"last_used_ms", "kept_as"))
		builds[i]["models"] = max(1, len(b.GetMembers()))
	}
	return jsonout.Object{"model": m.name, "model_digest": m.digest, "logical_bytes": m.logical,
		"own_bytes": m.own, "shared_bytes": m.shared, "builds": builds}
}

func newDu(a *cli.Call) *cobra.Command {
	var request wire.Usage
	return &cobra.Command{
		Use:   "du [ENTRY|MODEL...]",
		Short: "show disk usage by model and user",
		Long: `du lists builds by model, the largest first: what removing each would free (own),
what other builds need too (shared), and how it is kept. Then it lists users and execution
providers.

With two entries it compares their files and prints what they have in common.

Files with common bytes store them twice until one is packed; the last line says how much that is.
Users see their own builds and the shared ones that they requested. ENTRY is as for show.` +
			exit.Help(exit.AskingCodes...),
		Example: `  epcachectl du
  epcachectl du batch1.onnx batch4.onnx`,
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client,
			args []string) (err error) {
			if request.Entries, err = modelfile.Entries(ctx, args); err != nil {
				return err
			}
			entries := request.Entries
			return exit.WithVerb("du",
				modelfile.AsGiven(usageText(ctx, a, c, &request), args, entries))
		}),
	}
}

// usageText reads all pages, and prints each model as soon as all of its builds have arrived.
func usageText(ctx context.Context, a *cli.Call, c *unixsock.Client, request *wire.Usage) error {
	out := &usagePrinter{p: a.Print, json: a.JSON, entries: len(request.Entries),
		array: term.NewArray(a.Print, "  "), table: term.NewColumns(a.Print)}
	err := a.WithProgress(func(progress func(*wire.Progress)) error {
		for first := true; first || request.After != ""; first = false {
			reply, err := unixsock.Ask[wire.UsageReply](ctx, c, request, progress)
			if err != nil {
				return err
			}
			if first {
				out.restBytes = reply
			}
			for _, b := range reply.GetBuilds() {
				out.add(b)
			}
			request.After = reply.GetNext()
			if err := out.models(request.After == ""); err != nil {
				return err
			}
			progress(&wire.Progress{Phase: "listing", Detail: term.Count(out.builds, "build"),
				Done: out.builds, Total: out.restBytes.GetSpace().GetBuilds()})
		}
		return nil
	})
	if err != nil {
		return err
	}
	return out.end()
}

type usagePrinter struct {
	p         *term.Printer
	json      bool
	entries   int // number of named entries
	array     *term.Array
	table     *term.Columns
	restBytes *wire.UsageReply // the first page, which has the lines below the models
	current   []duModel        // unprinted models, of which the last is incomplete
	builds    uint64           // number of builds so far
	started   bool
}

// add adds a build. The builds of a model follow each other.
func (u *usagePrinter) add(one *wire.BuildUsage) {
	b, last := one.GetBuild(), len(u.current)-1
	if last < 0 || u.current[last].digest != b.GetModelDigest() {
		u.current = append(u.current, duModel{name: b.GetModelName(), digest: b.GetModelDigest()})
		last++
	}
	m := &u.current[last]
	m.logical += one.GetLogicalBytes()
	m.own += one.GetOwnBytes()
	m.shared += one.GetOnceBytes()
	m.builds = append(m.builds, one)
	u.builds++
}

// models prints the complete models, with all also the last one.
func (u *usagePrinter) models(all bool) error {
	list := u.current
	if !all {
		list = list[:max(0, len(list)-1)]
	}
	u.current = slices.Clone(u.current[len(list):])
	if u.json {
		if !u.started {
			u.started = true
			if err := u.p.Result([]byte("{\n  \"models\": ")); err != nil {
				return err
			}
		}
		objects := make([]any, len(list))
		for i := range list {
			objects[i] = list[i].json()
		}
		return u.array.Add(objects...)
	}
	var rows [][]string
	if !u.started && len(list) > 0 {
		u.started = true
		rows = [][]string{{"OWN", "SHARED", "LOGICAL", "MODEL / BUILD"}}
	}
	for i := range list {
		rows = append(rows, list[i].rows()...)
	}
	return u.table.Print(rows)
}

func (u *usagePrinter) end() error {
	if u.json {
		rest := jsonout.Of(u.restBytes, "users", "eps", "shared", "shared_bytes", "packable_bytes")
		rest["space"] = spaceOf(u.restBytes.GetSpace())
		if u.entries > 0 {
			delete(rest, "packable_bytes") // the daemon sends it for all builds only
		}
		text, err := jsonout.Indented("", rest)
		if err == nil {
			err = u.array.End()
		}
		if err == nil {
			err = u.p.Result(append([]byte(","), bytes.TrimPrefix(text, []byte("{"))...))
		}
		return err
	}
	switch {
	case u.entries == 2:
		few := int64(0)
		for _, s := range u.restBytes.GetShared() {
			if n := s.GetBytes(); n < minSharedBytes && n < u.restBytes.GetSharedBytes()/2 {
				few += n
				continue
			}
			u.p.Line("%s of %s, %s, are also in %s", term.Bytes(s.GetBytes()),
				term.TextOrDash(s.GetSecondName()), term.Bytes(s.GetSize()),
				term.TextOrDash(s.GetFirstName()))
		}
		if few > 0 {
			u.p.Line("also %s of small files, mostly graphs", term.Bytes(few))
		}
		u.p.Line("the second has %s in common with the first",
			term.Bytes(u.restBytes.GetSharedBytes()))
	case u.entries == 0:
		printUsageSums(u.p, u.restBytes)
	case u.entries > 2:
		u.p.Note("give two entries to compare them")
	}
	return nil
}

func (m *duModel) rows() [][]string {
	rows := [][]string{{term.Bytes(m.own), term.Bytes(m.shared), term.Bytes(m.logical),
		term.TextOrDash(m.name) + " " + term.Short(m.digest)}}
	for i, one := range m.builds {
		b, branch := one.GetBuild(), "├─ "
		if len(m.builds) == 1 { // one line for both, because the numbers are equal
			branch = rows[0][3] + ", build "
			rows = nil
		} else if i == len(m.builds)-1 {
			branch = "└─ "
		}
		what := branch + term.Short(b.GetBuild()) + " " + term.TextOrDash(b.GetEp()) +
			term.WithPrefix(", ", one.GetShapes())
		if b.GetScope() != "shared" {
			what += ", " + term.TextOrDash(b.GetScope()) + " only"
		}
		if n := len(b.GetMembers()); n > 1 {
			what += fmt.Sprintf(", a group of %d", n)
		}
		if b.GetState() != "current" {
			what += term.WithPrefix(", ", b.GetState())
		}
		if b.GetPinned() {
			what += ", pinned"
		}
		if b.GetKeptAs() != "whole" {
			what += term.WithPrefix(", ", b.GetKeptAs())
		}
		rows = append(rows, []string{term.Bytes(one.GetOwnBytes()),
			term.Bytes(one.GetSharedBytes()), term.Bytes(one.GetLogicalBytes()), what})
	}
	return rows
}

func printUsageSums(p *term.Printer, r *wire.UsageReply) {
	rows := [][]string{{"OF", "OWN", "ON DISK", "LOGICAL", "BUILDS", "QUOTA"}}
	for _, s := range slices.Concat(r.GetUsers(), r.GetEps()) {
		quota := "-"
		if s.GetQuotaBytes() > 0 {
			quota = term.Bytes(s.GetQuotaBytes())
		}
		rows = append(rows, []string{term.TextOrDash(s.GetName()), term.Bytes(s.GetOwnBytes()),
			term.Bytes(s.GetDiskBytes()), term.Bytes(s.GetLogicalBytes()),
			term.Count(s.GetBuilds(), "build"), quota})
	}
	if len(rows) > 1 {
		p.Table(rows)
	}
	p.Line("%s", spaceLine(r.GetSpace()))
	if !isUserAccount(r.GetSpace()) {
		p.Line("%s", packableLine(r.GetPackableBytes(), r.GetSpace().GetToLookAt()))
	}
}

// packableLine says how many bytes packing would free, as far as that is known.
func packableLine(bytes int64, unknown uint64) string {
	left := term.Count(unknown, "file") + " not yet compared with others"
	text := "packing would free no space"
	if bytes > 0 {
		text = fmt.Sprintf("packing would free about %s of it; for details: epcachectl pack "+
			"--all -n",
			term.Bytes(bytes))
	}
	switch {
	case unknown == 0:
		return text
	case bytes == 0:
		return "how much packing would free is not known yet: " + left
	}
	return text + "; " + left
}

// minSharedBytes is the least number of shared bytes that is reported, because all graphs of one
// execution provider are similar.
const minSharedBytes = 4 << 10

func spaceLine(s *wire.Space) string {
	if isUserAccount(s) {
		text := term.Count(s.GetBuilds(), "build") + " of yours, " + term.Bytes(s.GetLogicalBytes())
		if s.GetBudgetBytes() > 0 {
			text += "; the limit for all users is " + term.Bytes(s.GetBudgetBytes())
		}
		return text
	}
	text := term.Bytes(usedBytes(s)) + " on disk"
	if s.GetBudgetBytes() > 0 {
		text += " of " + term.Bytes(s.GetBudgetBytes())
	}
	text += ", for files of " + term.Bytes(s.GetLogicalBytes())
	if s.GetUniqueBytes() != s.GetLogicalBytes() {
		text += fmt.Sprintf(" (%s with equal files counted once)", term.Bytes(s.GetUniqueBytes()))
	}
	return text + ", " + term.Count(s.GetEntries(), "entry") + ", " +
		term.Count(s.GetBuilds(), "build")
}

// isUserAccount reports whether the account covers only the caller's builds, as for ordinary users.
func isUserAccount(s *wire.Space) bool { return usedBytes(s) == 0 && s.GetEntries() == 0 }

func usedBytes(s *wire.Space) int64 {
	return s.GetDiskBytes() + s.GetUnpackedBytes() + s.GetManifestBytes() + s.GetHeldBytes() +
		s.GetReservedBytes()
}

func spaceOf(s *wire.Space) jsonout.Object {
	out := jsonout.Of(s)
	out["used_bytes"] = usedBytes(s)
	return out
}
