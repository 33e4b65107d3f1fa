package main

import (
	"bytes"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// duRest is what du prints with --json behind "models", a list of duModel.
type duRest struct {
	Users       []duSum          `json:"users"`
	EPs         []duSum          `json:"eps"`
	Space       spaceResult      `json:"space"`
	Shared      []sharedBlobJSON `json:"shared"`
	SharedBytes int64            `json:"shared_bytes"` // of the second entry's files, that the first's have as well

	PackableBytes *int64 `json:"packable_bytes,omitempty"` // on disk: what packing would free of all builds, as far as is known; not there with entries
}

type duModel struct {
	Model        string    `json:"model"`
	ModelDigest  string    `json:"model_digest"`
	LogicalBytes int64     `json:"logical_bytes"`
	OwnBytes     int64     `json:"own_bytes"`    // on disk, of its builds one by one
	SharedBytes  int64     `json:"shared_bytes"` // what several of its builds share counts once: less than theirs together, then
	Builds       []duBuild `json:"builds"`
}

type duBuild struct {
	Build        string `json:"build"`
	EP           string `json:"ep"`
	Shapes       string `json:"shapes"` // what free dimensions were fixed at: "batch=1, sequence=128"
	Scope        string `json:"scope"`
	State        string `json:"state"`
	Pinned       bool   `json:"pinned"`
	Models       int    `json:"models"` // of a group: how many it serves
	LogicalBytes int64  `json:"logical_bytes"`
	OwnBytes     int64  `json:"own_bytes"`    // on disk: what its removal would free
	SharedBytes  int64  `json:"shared_bytes"` // on disk: what other builds need as well, of this model or another
	LastUsedMs   int64  `json:"last_used_ms"`
	KeptAs       string `json:"kept_as"` // as in list
}

type duSum struct {
	Name         string `json:"name"`
	Builds       uint64 `json:"builds"`
	LogicalBytes int64  `json:"logical_bytes"`
	OwnBytes     int64  `json:"own_bytes"`
	DiskBytes    int64  `json:"disk_bytes"`
	QuotaBytes   int64  `json:"quota_bytes"`
}

type sharedBlobJSON struct {
	Digest     string `json:"digest"` // of the second entry's file
	Size       int64  `json:"size"`
	Bytes      int64  `json:"bytes"` // of it, that stand in the first's file as well
	FirstName  string `json:"first_name"`
	SecondName string `json:"second_name"`
}

func (a *app) duCommand() *cobra.Command {
	var request wire.Usage
	var svg bool
	cmd := &cobra.Command{
		Use:   "du [ENTRY|MODEL...] [--svg]",
		Short: "tell where the space goes",
		Long: `du lists the builds that are kept by model, the largest first: what the removal of each would free (own), and what other builds
need as well (shared; in the row of a model once, also where several of its builds have it), on disk in whole blocks, and whether it is packed, with a copy that is served or without; then what the builds of each user and execution provider take together.
ENTRY is as for show. Two entries, and no more, are compared: their files are read, and what they have in common is told,
file by file, wherever it stands in them. A weight-sharing group is one build. With --svg it prints a picture instead of which parts
of the files are shared among which, of the 60 largest; with --json what is drawn. Files that have bytes in common have them twice on disk
until one of them is packed: the last line says how much that is.
Users see their own builds and the shared ones that they had.` + statusHelp(exitDone, exitFailed, exitUsage, exitNotFound, exitNoDaemon, exitNotAllowed),
		Example: `  epcachectl du
  epcachectl du batch1.onnx batch4.onnx
  epcachectl du --svg > shared.svg`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				entries, err := entriesOf(ctx, args)
				if err != nil {
					return err
				}
				request.Entries = entries
				if svg {
					return asGiven(a.picture(ctx, c, entries), args, entries)
				}
				return asGiven(a.usage(ctx, c, &request), args, entries)
			})
		},
	}
	cmd.Flags().BoolVar(&svg, "svg", false, "print a picture of what files share")
	return cmd
}

// picture prints what files share as an SVG, or what would be drawn.
func (a *app) picture(ctx context.Context, c *unixsock.Client, entries []string) error {
	reply, err := c.Layout(ctx, &wire.Layout{Entries: entries, Most: svgFiles})
	if err != nil {
		return err
	}
	out := layoutOf(reply)
	if a.json {
		return a.print.json(out)
	}
	_, err = a.print.out.Write(drawLayout(&out))
	return err
}

// usage asks for all pages, and prints the models of each as soon as all of their builds are there.
func (a *app) usage(ctx context.Context, c *unixsock.Client, request *wire.Usage) error {
	out := &usagePrinter{p: a.print, json: a.json, entries: len(request.Entries), array: jsonArray{p: a.print, indent: "  "}, table: columns{p: a.print}}
	err := a.showing(func(progress func(*wire.Progress)) error {
		for first := true; first || request.After != ""; first = false {
			reply, err := c.Usage(ctx, request, progress)
			if err != nil {
				return err
			}
			if first {
				out.take(reply)
			}
			var whole []duModel
			for _, b := range reply.GetBuilds() {
				whole = append(whole, out.add(b)...)
			}
			if request.After = reply.GetNext(); request.After == "" && out.model != nil {
				whole = append(whole, *out.model)
			}
			if err := out.models(whole); err != nil {
				return err
			}
			progress(&wire.Progress{Phase: "listing", Detail: counted(out.builds, "build"), Done: out.builds, Total: out.rest.Space.Builds})
		}
		return nil
	})
	if err != nil {
		return err
	}
	return out.end()
}

// usagePrinter prints what du tells while it comes.
type usagePrinter struct {
	p       *printer
	json    bool
	entries int // that were named
	array   jsonArray
	table   columns
	rest    duRest
	model   *duModel // whose builds are coming
	builds  uint64   // that came
	begun   bool
}

// take has what the first page alone tells.
func (u *usagePrinter) take(r *wire.UsageReply) {
	u.rest = duRest{Users: sumsOf(r.GetUsers()), EPs: sumsOf(r.GetEps()), Space: spaceOf(r.GetSpace()), Shared: []sharedBlobJSON{}, SharedBytes: r.GetSharedBytes()}
	if n := r.GetPackableBytes(); u.entries == 0 { // else the daemon does not say it
		u.rest.PackableBytes = &n
	}
	for _, s := range r.GetShared() {
		u.rest.Shared = append(u.rest.Shared, sharedBlobJSON{s.GetDigest(), s.GetSize(), s.GetBytes(), s.GetFirstName(), s.GetSecondName()})
	}
}

// add takes a build; those of a model come one after the other. It gives the model before, when another one begins.
func (u *usagePrinter) add(one *wire.BuildUsage) (whole []duModel) {
	b := one.GetBuild()
	if u.model == nil || u.model.ModelDigest != b.GetModelDigest() {
		if u.model != nil {
			whole = append(whole, *u.model)
		}
		u.model = &duModel{Model: b.GetModelName(), ModelDigest: b.GetModelDigest(), Builds: []duBuild{}}
	}
	m := u.model
	m.LogicalBytes += one.GetLogicalBytes()
	m.OwnBytes += one.GetOwnBytes()
	m.SharedBytes += one.GetOnceBytes()
	m.Builds = append(m.Builds, duBuild{b.GetBuild(), b.GetEp(), one.GetShapes(), b.GetScope(), b.GetState(), b.GetPinned(), max(1, len(b.GetMembers())),
		one.GetLogicalBytes(), one.GetOwnBytes(), one.GetSharedBytes(), b.GetLastUsedMs(), b.GetKeptAs()})
	u.builds++
	return whole
}

// models prints some models.
func (u *usagePrinter) models(list []duModel) error {
	if u.json {
		if !u.begun {
			u.begun = true
			if err := u.p.result([]byte("{\n  \"models\": ")); err != nil {
				return err
			}
		}
		return u.array.add(anys(list)...)
	}
	var rows [][]string
	if !u.begun && len(list) > 0 {
		u.begun = true
		rows = [][]string{{"OWN", "SHARED", "LOGICAL", "MODEL / BUILD"}}
	}
	for i := range list {
		rows = append(rows, list[i].rows()...)
	}
	return u.table.print(rows)
}

// end prints what stands below the models.
func (u *usagePrinter) end() error {
	if u.json {
		text, err := indented("", &u.rest)
		if err == nil {
			err = u.array.end()
		}
		if err == nil {
			err = u.p.result(append([]byte(","), bytes.TrimPrefix(text, []byte("{"))...))
		}
		return err
	}
	switch {
	case u.entries == 2:
		few := int64(0)
		for _, s := range u.rest.Shared {
			if s.Bytes < fewBytes && s.Bytes < u.rest.SharedBytes/2 {
				few += s.Bytes
				continue
			}
			u.p.line("%s of %s, %s, stand in %s as well", byteSize(s.Bytes), orDash(s.SecondName), byteSize(s.Size), orDash(s.FirstName))
		}
		if few > 0 {
			u.p.line("%s of small files, mostly graphs, as well", byteSize(few))
		}
		u.p.line("the second has %s in common with the first", byteSize(u.rest.SharedBytes))
	case u.entries == 0:
		return u.p.usageSums(&u.rest)
	case u.entries > 2:
		u.p.note("nothing is compared: for what entries have in common name two")
	}
	return nil
}

func sumsOf(list []*wire.UsageSum) []duSum {
	out := []duSum{}
	for _, s := range list {
		out = append(out, duSum{s.GetName(), s.GetBuilds(), s.GetLogicalBytes(), s.GetOwnBytes(), s.GetDiskBytes(), s.GetQuotaBytes()})
	}
	return out
}

// rows are a model and its builds.
func (m *duModel) rows() [][]string {
	rows := [][]string{{byteSize(m.OwnBytes), byteSize(m.SharedBytes), byteSize(m.LogicalBytes), orDash(m.Model) + " " + short(m.ModelDigest)}}
	for i, b := range m.Builds {
		branch := "├─ "
		if i == len(m.Builds)-1 {
			branch = "└─ "
		}
		what := branch + short(b.Build) + " " + orDash(b.EP) + shapesText(b.Shapes)
		if b.Scope != "shared" {
			what += ", " + orDash(b.Scope) + " only"
		}
		if b.Models > 1 {
			what += fmt.Sprintf(", a group of %d", b.Models)
		}
		if b.State != "" && b.State != "current" {
			what += ", " + printable(b.State)
		}
		if b.Pinned {
			what += ", pinned"
		}
		if b.KeptAs != "" && b.KeptAs != "whole" {
			what += ", " + printable(b.KeptAs)
		}
		rows = append(rows, []string{byteSize(b.OwnBytes), byteSize(b.SharedBytes), byteSize(b.LogicalBytes), what})
	}
	return rows
}

func (p *printer) usageSums(r *duRest) error {
	rows := [][]string{{"OF", "OWN", "ON DISK", "LOGICAL", "BUILDS", "QUOTA"}}
	for _, s := range append(append([]duSum{}, r.Users...), r.EPs...) {
		quota := "-"
		if s.QuotaBytes > 0 {
			quota = byteSize(s.QuotaBytes)
		}
		rows = append(rows, []string{orDash(s.Name), byteSize(s.OwnBytes), byteSize(s.DiskBytes), byteSize(s.LogicalBytes), counted(s.Builds, "build"), quota})
	}
	if len(rows) > 1 {
		if err := p.table(rows); err != nil {
			return err
		}
	}
	p.line("%s", spaceLine(&r.Space))
	if r.PackableBytes != nil {
		p.line("%s", packableLine(*r.PackableBytes, r.Space.ToLookAt))
	}
	return nil
}

// packableLine says what packing would free, as far as that is known.
func packableLine(bytes int64, unknown uint64) string {
	verb := "are"
	if unknown == 1 {
		verb = "is"
	}
	switch {
	case bytes == 0 && unknown > 0:
		return fmt.Sprintf("what packing would free is not known yet: %s %s still to be compared with others", counted(unknown, "file"), verb)
	case bytes == 0:
		return "packing would free nothing"
	}
	text := fmt.Sprintf("packing would free some %s of it: epcachectl pack --all -n tells of which, and when", byteSize(bytes))
	if unknown > 0 {
		text += fmt.Sprintf("; %s %s still to be compared with others", counted(unknown, "file"), verb)
	}
	return text
}

// fewBytes is what two files have in common that is not worth a line: graphs of one execution provider are alike.
const fewBytes = 4 << 10

// spaceLine says in one line how much is used, of how much, and for what.
func spaceLine(s *spaceResult) string {
	text := fmt.Sprintf("%s on disk", byteSize(s.UsedBytes))
	if s.BudgetBytes > 0 {
		text += " of " + byteSize(s.BudgetBytes)
	}
	text += fmt.Sprintf(", for files of %s", byteSize(s.LogicalBytes))
	if s.UniqueBytes != s.LogicalBytes {
		text += fmt.Sprintf(" (%s, equal ones once)", byteSize(s.UniqueBytes))
	}
	return text + fmt.Sprintf(", %s, %s", counted(s.Entries, "entry"), counted(s.Builds, "build"))
}
