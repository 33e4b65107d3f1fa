// Package picture draws the bytes that files of builds share.
package picture

import (
	"bytes"
	"cmp"
	"encoding/xml"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock/wire"
)

// The picture has a bar for each file, in proportion to its size. Bytes of one file only are grey.
// Common bytes have the colour of the file that stores them, in all files.

// Sizes are in pixels.
const (
	svgWidth   = 1080
	svgMargin  = 24
	svgLabels  = 290 // the column of names
	svgBar     = 540
	svgRow     = 34
	svgBarHigh = 20
	svgColumn  = 2 // the resolution of bars, which bounds the size of a picture
	MostFiles  = 60
	svgNames   = 36 // characters of a name
)

// svgColours distinguish holders, also for the colour-blind; svgOther is for all others.
var svgColours = []string{"#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377",
	"#ee7733", "#0077bb", "#997700", "#44aa99", "#882255", "#88ccaa"}

const (
	svgOther = "#555555" // the colour of holders beyond these
	svgAlone = "#d9dce0"
)

type picture struct {
	layout  *wire.LayoutReply
	files   []*wire.FileLayout // in the order of rows
	colours map[string]string
	shared  []string         // holders with shared bytes, the most first
	takers  map[string]int   // by holder: number of other files with its bytes
	bytes   map[string]int64 // by holder: sum of shared bytes of all files
	taken   map[string][]*wire.Piece
	byName  map[string]*wire.FileLayout // by digest
	family  map[string]string           // by digest or holder: representative of its family
	out     bytes.Buffer
}

// Draw returns the picture as a self-contained SVG.
func Draw(l *wire.LayoutReply) []byte {
	p := &picture{layout: l, colours: map[string]string{}, takers: map[string]int{},
		bytes: map[string]int64{}, taken: map[string][]*wire.Piece{},
		byName: map[string]*wire.FileLayout{}, family: map[string]string{}}
	p.findFamilies()
	p.order()
	high := p.draw()
	return fmt.Appendf(nil,
		`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" `+
			`role="img" aria-label="what compiled models share">
<style>text{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;`+
			`fill:#1f2328}.title{font-size:18px;font-weight:600}.name{font-size:13px}`+
			`.small{font-size:11px;fill:#59636e}`+
			`.figure{font-size:12px;text-anchor:end}`+
			`.hint{font-size:11px;fill:#59636e;text-anchor:end}</style>
<rect width="%d" height="%d" fill="#ffffff"/>
%s</svg>
`, svgWidth, high, svgWidth, high, svgWidth, high, p.out.Bytes())
}

func (p *picture) findFamilies() {
	for _, f := range p.layout.GetFiles() {
		if p.byName[f.Digest] != nil {
			continue // one bar for a file of several builds
		}
		p.byName[f.Digest] = f
		p.files = append(p.files, f)
		var took []string
		for _, piece := range f.Pieces {
			holder := DigestAt(p.layout, piece.Holder)
			if holder == f.Digest {
				continue
			}
			p.bytes[holder] += piece.Length
			p.taken[holder] = append(p.taken[holder], &wire.Piece{At: piece.From,
				Length: piece.Length})
			if !slices.Contains(took, holder) {
				took = append(took, holder)
				p.takers[holder]++
			}
			if a, b := p.root(f.Digest), p.root(holder); a != b {
				p.family[a] = b
			}
		}
	}
	p.shared = slices.SortedFunc(maps.Keys(p.bytes), func(a, b string) int {
		return cmp.Or(cmp.Compare(p.bytes[b], p.bytes[a]), strings.Compare(a, b))
	})
	for i, holder := range p.shared {
		p.colours[holder] = svgOther
		if i < len(svgColours) {
			p.colours[holder] = svgColours[i]
		}
	}
}

func (p *picture) root(digest string) string {
	for p.family[digest] != "" {
		digest = p.family[digest]
	}
	return digest
}

// order sorts files that share bytes next to each other: the largest families first, and in each
// the files that store shared bytes first.
func (p *picture) order() {
	sizes := map[string]int64{}
	for _, f := range p.files {
		sizes[p.root(f.Digest)] += f.Size
	}
	slices.SortStableFunc(p.files, func(a, b *wire.FileLayout) int {
		x, y := p.root(a.Digest), p.root(b.Digest)
		return cmp.Or(cmp.Compare(sizes[y], sizes[x]), strings.Compare(x, y),
			cmp.Compare(p.bytes[b.Digest], p.bytes[a.Digest]), cmp.Compare(b.Size, a.Size))
	})
}

func escaped(text string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(term.Printable(text))) // a buffer has no write errors
	return b.String()
}

// shortened cuts a name in the middle, because its end distinguishes variants.
func shortened(name string, most int) string {
	r := []rune(term.TextOrDash(name))
	if len(r) > most {
		return string(r[:most/2-1]) + "…" + string(r[len(r)-(most-most/2):])
	}
	return string(r)
}

// variant returns a name for the build of a file. Parts that distinguish it from the model's other
// builds come first, because the end may be cut.
func (p *picture) variant(f *wire.FileLayout) string {
	apart := func(part string) bool {
		return slices.ContainsFunc(p.files, func(other *wire.FileLayout) bool {
			return other.ModelName == f.ModelName && !slices.Contains(variantParts(other), part)
		})
	}
	var first, last []string
	for _, part := range variantParts(f) {
		if apart(part) {
			first = append(first, part)
		} else {
			last = append(last, part)
		}
	}
	return strings.Join(slices.Concat(first, []string{term.Short(f.Build)}, last), ", ")
}

func variantParts(f *wire.FileLayout) (parts []string) {
	if f.Shapes != "" {
		parts = strings.Split(f.Shapes, ", ")
	}
	return append(parts, term.TextOrDash(strings.TrimSuffix(f.Ep, "ExecutionProvider")))
}

func (p *picture) add(format string, args ...any) { fmt.Fprintf(&p.out, format+"\n", args...) }

func (p *picture) text(x, y int, class, text string) {
	p.add(`<text x="%d" y="%d" class="%s">%s</text>`, x, y, class, escaped(text))
}

func (p *picture) draw() int {
	y := p.head()
	longest := int64(1)
	for _, f := range p.files {
		longest = max(longest, f.Size)
	}
	for i, f := range p.files {
		if i > 0 && p.root(f.Digest) != p.root(p.files[i-1].Digest) {
			y += svgRow / 3
		}
		p.row(f, y, longest)
		y += svgRow
	}
	if len(p.files) == 0 {
		p.text(svgMargin, y+14, "name", "no stored file is large enough to be drawn")
		y += svgRow
	}
	if p.layout.More > 0 {
		p.text(svgMargin, y+14, "small", fmt.Sprintf("%s more, %s, are smaller and not "+
			"drawn", term.Count(p.layout.More, "file"), term.Bytes(p.layout.MoreBytes)))
		y += svgRow
	}
	return y + svgMargin/2
}

func (p *picture) head() int {
	size, own := int64(0), int64(0)
	for _, f := range p.files {
		size += f.Size
		own += max(f.Size-f.SharedBytes, 0)
	}
	y := svgMargin + 36
	p.text(svgMargin, y-22, "title", "What compiled models share")
	p.text(svgMargin, y, "small", fmt.Sprintf("%s, %s in total, of which %s are in one file "+
		"only. Each bar is a file; its length is the "+
		"size.", term.Count(len(p.files), "file"), term.Bytes(size), term.Bytes(own)))
	y += 18
	p.swatch(svgMargin, y, svgAlone, "in this file only")
	x, shown := svgMargin+150, min(len(p.shared), len(svgColours))
	place := func(wide int, colour, label string) {
		if x+wide > svgWidth-svgMargin {
			x, y = svgMargin, y+18
		}
		p.swatch(x, y, colour, label)
		x += wide
	}
	for _, holder := range p.shared[:shown] {
		label := shortened(p.holderName(holder), 30) + ", also in " + term.Count(p.takers[holder],
			"other file")
		place(34+6*len([]rune(label)), p.colours[holder], label)
	}
	if others := len(p.shared) - shown; others > 0 {
		place(220, svgOther, "bytes of "+term.Count(others, "further file"))
	}
	return y + 30
}

func (p *picture) swatch(x, y int, colour, label string) {
	p.add(`<rect x="%d" y="%d" width="12" height="12" fill="%s"/>`, x, y, colour)
	p.text(x+18, y+10, "small", label)
}

// holderName returns the name of a holder's file.
func (p *picture) holderName(holder string) string {
	if f := p.byName[holder]; f != nil {
		return f.ModelName + " " + term.Short(f.Build)
	}
	return "packed files: " + term.Short(holder)
}

func (p *picture) row(f *wire.FileLayout, y int, longest int64) {
	p.text(svgMargin, y+12, "name", shortened(f.ModelName, svgNames))
	variant := p.variant(f)
	if r := []rune(variant); len(r) > svgNames+10 {
		variant = string(r[:svgNames+9]) + "…"
	}
	p.text(svgMargin, y+25, "small", variant)
	wide := max(int(int64(svgBar)*f.Size/longest), svgColumn)
	x := svgMargin + svgLabels
	for _, run := range p.colourRuns(f, max(wide/svgColumn, 1)) {
		p.add(`<rect x="%d" y="%d" width="%d" height="%d" fill="%s"><title>%s</title></rect>`,
			x+run.from*svgColumn, y+4, (run.to-run.from)*svgColumn, svgBarHigh, run.colour,
			escaped(fmt.Sprintf("%s: %s", term.Bytes(run.bytes), run.what)))
	}
	p.add(
		`<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#59636e" `+
			`stroke-width="1"/>`, x, y+4, wide/svgColumn*svgColumn, svgBarHigh)
	right := svgWidth - svgMargin
	p.text(right, y+12, "figure", term.Bytes(f.Size))
	form := "stored whole"
	switch {
	case f.Packed:
		form = "packed" + CompressedText(f) + ", " + term.Bytes(f.OwnBytes) + " its own"
	case f.SharedBytes > 0:
		form += ", " + term.Bytes(f.SharedBytes) + " elsewhere too"
	}
	p.text(right, y+25, "hint", form)
}

// colourRun is a part of a bar with one colour; from and to count columns.
type colourRun struct {
	from, to int
	colour   string
	what     string
	bytes    int64
}

// colourRuns divides a file into columns, each with the colour of most of its bytes.
func (p *picture) colourRuns(f *wire.FileLayout, columns int) (out []colourRun) {
	type part struct {
		at, end int64
		holder  string
	}
	var parts []part
	for _, piece := range f.Pieces {
		if holder := DigestAt(p.layout, piece.Holder); holder != f.Digest {
			parts = append(parts, part{piece.At, piece.At + piece.Length, holder})
		}
	}
	for _, piece := range mergeOverlapping(p.taken[f.Digest]) {
		parts = append(parts, part{piece.At, piece.At + piece.Length, f.Digest})
	}
	for i := range columns {
		begin, end := f.Size*int64(i)/int64(columns), f.Size*int64(i+1)/int64(columns)
		weights, best, sum := map[string]int64{}, "", int64(0)
		for _, q := range parts {
			if n := min(q.end, end) - max(q.at, begin); n > 0 {
				weights[q.holder] += n
				sum += n
			}
		}
		for _, holder := range slices.Sorted(maps.Keys(weights)) {
			if weights[holder] > weights[best] {
				best = holder
			}
		}
		next := colourRun{from: i, to: i + 1, colour: svgAlone, what: "in this file only",
			bytes: end - begin}
		if 2*sum >= end-begin && best != "" {
			next.colour, next.what = p.colours[best], "of "+p.holderName(best)
			if best == f.Digest {
				next.what = "also in " + term.Count(p.takers[best], "other file")
			}
		}
		if n := len(out); n > 0 && out[n-1].colour == next.colour && out[n-1].what == next.what {
			out[n-1].to, out[n-1].bytes = next.to, out[n-1].bytes+next.bytes
			continue
		}
		out = append(out, next)
	}
	return out
}

// mergeOverlapping joins ranges that overlap, in order.
func mergeOverlapping(all []*wire.Piece) (out []*wire.Piece) {
	slices.SortFunc(all, func(a, b *wire.Piece) int { return cmp.Compare(a.At, b.At) })
	for _, r := range all {
		if n := len(out); n > 0 && r.At <= out[n-1].At+out[n-1].Length {
			out[n-1].Length = max(out[n-1].Length, r.At+r.Length-out[n-1].At)
			continue
		}
		out = append(out, &wire.Piece{At: r.At, Length: r.Length})
	}
	return out
}

// DigestAt returns the digest of the file at an index of Holders, "" beyond them.
func DigestAt(r *wire.LayoutReply, at uint32) string {
	if int(at) < len(r.GetHolders()) {
		return r.GetHolders()[at]
	}
	return ""
}

// CompressedText says how many bytes of a packed file are compressed.
func CompressedText(f *wire.FileLayout) string {
	if f.GetCompressedBytes() == 0 {
		return ""
	}
	return ", " + term.Bytes(f.GetCompressedBytes()) + " of it compressed"
}
