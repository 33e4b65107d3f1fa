package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// layoutResult is what show --tensors and du --svg print with --json.
type layoutResult struct {
	Files     []laidFileJSON `json:"files"`
	More      uint64         `json:"more"` // files that are left out: the smaller ones
	MoreBytes int64          `json:"more_bytes"`
}

type laidFileJSON struct {
	Build       string       `json:"build"`
	ModelName   string       `json:"model_name"`
	ModelDigest string       `json:"model_digest"`
	EP          string       `json:"ep"`
	Shapes      string       `json:"shapes"` // what free dimensions were fixed at: "batch=1, sequence=128"
	File        string       `json:"file"`
	Digest      string       `json:"digest"`
	Size        int64        `json:"size"`
	SharedBytes int64        `json:"shared_bytes"` // that stand in another of these files as well
	Packed      bool         `json:"packed"`
	OwnBytes    int64        `json:"own_bytes"`        // that it takes from no other file: while it is whole, all
	Compressed  int64        `json:"compressed_bytes"` // of its own bytes, how many are kept compressed while it is packed
	Pieces      []pieceJSON  `json:"pieces"`           // all of it, in order
	Tensors     []placedJSON `json:"tensors"`
	MoreTensors uint32       `json:"more_tensors"`       // that are left out: the smallest
	NamedBytes  int64        `json:"named_bytes"`        // of tensors that are known by name, of those that are left out too
	NamedBy     string       `json:"named_by,omitempty"` // the source model whose weights were looked for in it; empty: it names its tensors itself, or nothing does
	Unknown     string       `json:"unknown,omitempty"`  // why no names of tensors are known
}

type pieceJSON struct {
	At     int64  `json:"at"`
	Length int64  `json:"length"`
	Holder string `json:"holder"` // digest of the file that has these bytes, itself or another
	From   int64  `json:"from"`   // where they begin there
}

type placedJSON struct {
	Name        string       `json:"name"`
	Kind        string       `json:"kind"` // "tensor", "partition", "graph", "head", "weights" (that partitions share)
	Type        string       `json:"type"`
	Shape       string       `json:"shape"`
	Form        string       `json:"form,omitempty"` // of one that was looked for: how it stands there; such a tensor may have several ranges
	Offset      int64        `json:"offset"`
	Length      int64        `json:"length"`
	Holder      string       `json:"holder"` // where its first byte stands
	From        int64        `json:"from"`
	HeldBy      *sharerJSON  `json:"held_by,omitempty"` // a build that has the holder as a file, where that is another one
	SharedBytes int64        `json:"shared_bytes"`      // of it, that another build has as well
	With        []sharerJSON `json:"with"`              // who has half of it or more
}

type sharerJSON struct {
	Build     string `json:"build"`
	ModelName string `json:"model_name"`
	EP        string `json:"ep"`
	File      string `json:"file"`
}

func layoutOf(r *wire.LayoutReply) layoutResult {
	holder := func(at uint32) string {
		if int(at) < len(r.GetHolders()) {
			return r.GetHolders()[at]
		}
		return ""
	}
	out := layoutResult{Files: []laidFileJSON{}, More: r.GetMore(), MoreBytes: r.GetMoreBytes()}
	for _, f := range r.GetFiles() {
		one := laidFileJSON{Build: f.GetBuild(), ModelName: f.GetModelName(), ModelDigest: f.GetModelDigest(), EP: f.GetEp(), Shapes: f.GetShapes(), File: f.GetName(), Digest: f.GetDigest(),
			Size: f.GetSize(), SharedBytes: f.GetSharedBytes(), Packed: f.GetPacked(), OwnBytes: f.GetOwnBytes(), Compressed: f.GetCompressedBytes(), Pieces: []pieceJSON{}, Tensors: []placedJSON{}, MoreTensors: f.GetMoreTensors(), NamedBytes: f.GetNamedBytes(),
			NamedBy: f.GetNamedBy(), Unknown: f.GetUnknown()}
		for _, p := range f.GetPieces() {
			one.Pieces = append(one.Pieces, pieceJSON{p.GetAt(), p.GetLength(), holder(p.GetHolder()), p.GetFrom()})
		}
		for _, t := range f.GetTensors() {
			placed := placedJSON{t.GetName(), t.GetKind(), t.GetType(), t.GetShape(), t.GetForm(), t.GetOffset(), t.GetLength(), holder(t.GetHolder()), t.GetFrom(), nil, t.GetSharedBytes(), []sharerJSON{}}
			if by := r.GetHeldBy(); placed.Holder != f.GetDigest() && int(t.GetHolder()) < len(by) && by[t.GetHolder()].GetBuild() != "" {
				s := by[t.GetHolder()]
				placed.HeldBy = &sharerJSON{s.GetBuild(), s.GetModelName(), s.GetEp(), s.GetFile()}
			}
			for _, at := range t.GetWith() {
				if int(at) < len(f.GetSharers()) {
					s := f.GetSharers()[at]
					placed.With = append(placed.With, sharerJSON{s.GetBuild(), s.GetModelName(), s.GetEp(), s.GetFile()})
				}
			}
			one.Tensors = append(one.Tensors, placed)
		}
		out.Files = append(out.Files, one)
	}
	return out
}

// showTensors prints what the files of an entry are made of.
func (a *app) showTensors(ctx context.Context, c *unixsock.Client, arg string) error {
	entry, err := entryOf(ctx, arg)
	if err != nil {
		return verbError{"show", arg, err}
	}
	reply, err := c.Layout(ctx, &wire.Layout{Entries: []string{entry}, Tensors: true})
	if err != nil {
		return verbError{"show", arg, err}
	}
	out := layoutOf(reply)
	if a.json {
		return a.print.json(out)
	}
	for i := range out.Files {
		if err := a.print.tensors(&out.Files[i]); err != nil {
			return err
		}
	}
	if out.More > 0 {
		a.print.line("and %s more, %s", counted(out.More, "file"), byteSize(out.MoreBytes))
	}
	return nil
}

// compressedText says how much of a packed file is kept compressed.
func (f *laidFileJSON) compressedText() string {
	if f.Compressed == 0 {
		return ""
	}
	return ", " + byteSize(f.Compressed) + " of it compressed"
}

func (p *printer) tensors(f *laidFileJSON) error {
	form := ""
	if f.Packed {
		form = ", packed" + f.compressedText()
	}
	p.line("%s: %s of build %s by %s%s%s", orDash(f.File), byteSize(f.Size), short(f.Build), orDash(f.EP), shapesText(f.Shapes), form)
	named := percent(f.NamedBytes, f.Size)
	switch {
	case f.Unknown != "":
		p.line("  no names: %s", printable(f.Unknown))
	case f.NamedBy != "":
		rest := "; the rest has no names"
		if f.NamedBytes >= f.Size {
			rest = ""
		}
		p.line("  %s of it are weights of %s, found by their bytes%s", named, printable(f.NamedBy), rest)
	case f.NamedBytes > 0:
		p.line("  %s of it are tensors that it names itself", named)
	}
	rows := [][]string{}
	if len(f.Tensors) > 0 {
		rows = append(rows, []string{"  OFFSET", "SIZE", "TYPE", "SHARED", "NAME", "STANDS IN", "ALSO IN"})
	}
	for _, t := range together(f.Tensors) {
		rows = append(rows, []string{fmt.Sprintf("  %d", t.Offset), t.sizeText(), t.typeText(), percent(t.SharedBytes, t.Length), orDash(t.Name), t.holderText(f.Digest), sharersText(t.With)})
	}
	if len(rows) > 0 {
		if err := p.table(rows); err != nil {
			return err
		}
	}
	if f.MoreTensors > 0 {
		p.line("  and %d smaller ones", f.MoreTensors)
	}
	p.line("")
	return nil
}

// placedRow is a named range, or all ranges of a tensor that was looked for.
type placedRow struct {
	placedJSON
	ranges int
	whole  bool // all of them stand in the same file
}

// together makes one row of all ranges that a tensor has in one form. Who has half of them or more has the tensor.
func together(all []placedJSON) (rows []placedRow) {
	type key struct{ name, shape, form string }
	type has struct {
		who   sharerJSON
		bytes int64
	}
	at, with := make(map[key]int), make(map[int][]has)
	for _, t := range all {
		k := key{t.Name, t.Shape, t.Form}
		i, known := at[k]
		if !known || t.Form == "" {
			i = len(rows)
			at[k] = i
			rows = append(rows, placedRow{placedJSON: t, whole: true})
			rows[i].Length, rows[i].SharedBytes = 0, 0
		}
		r := &rows[i]
		r.ranges++
		r.Length += t.Length
		r.SharedBytes += t.SharedBytes
		r.whole = r.whole && r.Holder == t.Holder
		for _, who := range t.With {
			j := slices.IndexFunc(with[i], func(h has) bool { return h.who == who })
			if j < 0 {
				j = len(with[i])
				with[i] = append(with[i], has{who: who})
			}
			with[i][j].bytes += t.Length
		}
	}
	for i := range rows {
		rows[i].With = nil
		for _, h := range with[i] {
			if 2*h.bytes >= rows[i].Length {
				rows[i].With = append(rows[i].With, h.who)
			}
		}
	}
	return rows
}

func (r *placedRow) sizeText() string {
	if r.ranges > 1 {
		return fmt.Sprintf("%s in %d ranges", byteSize(r.Length), r.ranges)
	}
	return byteSize(r.Length)
}

func (r *placedRow) typeText() string {
	if r.Kind != "tensor" {
		return r.Kind
	}
	what := strings.TrimSpace(r.Type + " " + r.Shape)
	if r.Form != "" && r.Form != "as in the model" {
		what += " as " + r.Form
	}
	return orDash(what)
}

func (r *placedRow) holderText(file string) string {
	switch {
	case !r.whole:
		return "several files"
	case r.Holder == file:
		return "this file"
	}
	text := short(r.Holder)
	if r.HeldBy != nil {
		text += " of " + orDash(r.HeldBy.ModelName) + " " + short(r.HeldBy.Build)
	} else {
		text += " of no listed build"
	}
	if r.ranges > 1 {
		return text
	}
	return text + " at " + fmt.Sprint(r.From)
}

// shapesText tells at which shapes a build was made, behind other facts.
func shapesText(shapes string) string {
	if shapes == "" {
		return ""
	}
	return ", " + printable(shapes)
}

// percent is a part of a whole, "-" for none; all is said of nothing less.
func percent(part, all int64) string {
	switch {
	case part <= 0 || all <= 0:
		return "-"
	case part >= all:
		return "all"
	}
	return fmt.Sprintf("%.1f%%", min(100*float64(part)/float64(all), 99.9))
}

// sharersText names the first few who have it too.
func sharersText(all []sharerJSON) string {
	if len(all) == 0 {
		return "-"
	}
	var names []string
	for _, s := range all[:min(len(all), 2)] {
		names = append(names, orDash(s.ModelName)+" "+short(s.Build))
	}
	text := strings.Join(names, ", ")
	if n := len(all) - len(names); n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}
