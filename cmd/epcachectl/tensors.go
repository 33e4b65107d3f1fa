package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/picture"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// showTensors prints what the files of an entry are made of.
func (a *app) showTensors(ctx context.Context, c *unixsock.Client, arg, entry string) error {
	reply, err := c.Layout(ctx, &wire.Layout{Entries: []string{entry}, Tensors: true})
	if err != nil {
		return exit.Failing("show", arg, err)
	}
	if a.JSON {
		return a.Print.JSON(jsonout.Of(reply))
	}
	for _, f := range reply.GetFiles() {
		if err := printTensors(a.Print, reply, f); err != nil {
			return err
		}
	}
	if n := reply.GetMore(); n > 0 {
		a.Print.Line("and %s more, %s", term.Counted(n, "file"), term.Bytes(reply.GetMoreBytes()))
	}
	return nil
}

func printTensors(p *term.Printer, r *wire.LayoutReply, f *wire.LaidFile) error {
	form := ""
	if f.GetPacked() {
		form = ", packed" + picture.CompressedText(f)
	}
	p.Line("%s: %s of build %s by %s%s%s", term.OrDash(f.GetName()), term.Bytes(f.GetSize()),
		term.Short(f.GetBuild()), term.OrDash(f.GetEp()), term.After(", ", f.GetShapes()), form)
	named := percent(f.GetNamedBytes(), f.GetSize())
	switch {
	case f.GetUnknown() != "":
		p.Line("  no names: %s", term.Printable(f.GetUnknown()))
	case f.GetNamedBy() != "":
		rest := "; the rest has no names"
		if f.GetNamedBytes() >= f.GetSize() {
			rest = ""
		}
		p.Line("  %s of it are weights of %s, found by their bytes%s", named,
			term.Printable(f.GetNamedBy()), rest)
	case f.GetNamedBytes() > 0:
		p.Line("  %s of it are tensors that it names itself", named)
	}
	rows := [][]string{}
	if len(f.GetTensors()) > 0 {
		rows = append(rows, []string{"  OFFSET", "SIZE", "TYPE", "SHARED", "NAME", "STANDS IN", "ALSO IN"})
	}
	for _, t := range together(f.GetTensors()) {
		rows = append(rows, []string{fmt.Sprintf("  %d", t.first.GetOffset()), t.sizeText(),
			t.typeText(),
			percent(t.shared, t.length), term.OrDash(t.first.GetName()), t.holderText(r, f),
			sharersText(f, t.with)})
	}
	if len(rows) > 0 {
		if err := p.Table(rows); err != nil {
			return err
		}
	}
	if f.GetMoreTensors() > 0 {
		p.Line("  and %d smaller ones", f.GetMoreTensors())
	}
	p.Line("")
	return nil
}

// placedRow is a named range, or all ranges of a tensor that was looked for.
type placedRow struct {
	first          *wire.Placed
	length, shared int64
	with           []uint32 // sharers that have half of it or more, by place
	ranges         int
	whole          bool // all of them stand in the same file
}

// together makes one row of all ranges that a tensor has in one form. Who has half of them or more has the tensor.
func together(all []*wire.Placed) (rows []placedRow) {
	type key struct{ name, shape, form string }
	at, has := make(map[key]int), make(map[int]map[uint32]int64)
	for _, t := range all {
		k := key{t.GetName(), t.GetShape(), t.GetForm()}
		i, known := at[k]
		if !known || t.GetForm() == "" {
			i = len(rows)
			at[k], has[i] = i, make(map[uint32]int64)
			rows = append(rows, placedRow{first: t, whole: true})
		}
		r := &rows[i]
		r.ranges++
		r.length += t.GetLength()
		r.shared += t.GetSharedBytes()
		r.whole = r.whole && r.first.GetHolder() == t.GetHolder()
		for _, who := range t.GetWith() {
			if has[i][who] == 0 {
				r.with = append(r.with, who)
			}
			has[i][who] += t.GetLength()
		}
	}
	for i := range rows {
		r := &rows[i]
		r.with = slices.DeleteFunc(r.with,
			func(who uint32) bool { return 2*has[i][who] < r.length })
	}
	return rows
}

func (r *placedRow) sizeText() string {
	if r.ranges > 1 {
		return fmt.Sprintf("%s in %d ranges", term.Bytes(r.length), r.ranges)
	}
	return term.Bytes(r.length)
}

func (r *placedRow) typeText() string {
	t := r.first
	if t.GetKind() != "tensor" {
		return t.GetKind()
	}
	what := strings.TrimSpace(t.GetType() + " " + t.GetShape())
	if t.GetForm() != "" && t.GetForm() != "as in the model" {
		what += " as " + t.GetForm()
	}
	return term.OrDash(what)
}

func (r *placedRow) holderText(l *wire.LayoutReply, f *wire.LaidFile) string {
	at := r.first.GetHolder()
	switch {
	case !r.whole:
		return "several files"
	case picture.DigestAt(l, at) == f.GetDigest():
		return "this file"
	}
	text := term.Short(picture.DigestAt(l, at))
	if by := l.GetHeldBy(); int(at) < len(by) && by[at].GetBuild() != "" {
		text += " of " + term.OrDash(by[at].GetModelName()) + " " + term.Short(by[at].GetBuild())
	} else {
		text += " of no listed build"
	}
	if r.ranges > 1 {
		return text
	}
	return text + " at " + fmt.Sprint(r.first.GetFrom())
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
func sharersText(f *wire.LaidFile, with []uint32) string {
	var names []string
	for _, at := range with[:min(len(with), 2)] {
		if int(at) < len(f.GetSharers()) {
			s := f.GetSharers()[at]
			names = append(names, term.OrDash(s.GetModelName())+" "+term.Short(s.GetBuild()))
		}
	}
	text := term.OrDash(strings.Join(names, ", "))
	if n := len(with) - len(names); n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}
