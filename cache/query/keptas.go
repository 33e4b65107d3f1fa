package query

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
)

// KeptText says how the large files of a build are kept on the disk.
func (q *Queries) KeptText(b *index.Build) string {
	said := make(map[string]int64) // with the bytes of whom it is said
	for d, size := range store.DistinctBlobs(b) {
		if size < packing.Least {
			continue
		}
		said[q.formText(d)] += size
	}
	texts := slices.SortedFunc(maps.Keys(said), func(a, b string) int { return cmp.Or(cmp.Compare(said[b], said[a]), strings.Compare(a, b)) })
	for i, text := range texts {
		if len(texts) > 1 {
			texts[i] = bytesize.Text(said[text]) + " " + text
		}
	}
	if len(texts) == 0 {
		return q.KeptWord(b)
	}
	return strings.Join(texts, "; ")
}

// KeptWord says in a word how a build is kept: whole, or packed if some of its files is. A copy is
// the unpacked form beside it that requests are served from.
func (q *Queries) KeptWord(b *index.Build) string {
	word, copied := "whole", false
	for d := range store.DistinctBlobs(b) {
		if !q.forms.OnlyPacked(d) {
			continue
		}
		_, _, unpacked := q.forms.Bytes(d)
		word, copied = "packed", copied || unpacked > 0
	}
	if copied {
		word += ", with a copy"
	}
	return word
}

func (q *Queries) formText(d cas.Digest) string {
	p, packed := q.forms.Recipes.Has(d)
	if !packed || !q.forms.OnlyPacked(d) {
		return "whole"
	}
	text := fmt.Sprintf("packed, %s of %s its own", bytesize.Text(ownOf(&p)), bytesize.Text(p.Size))
	if p.Compressed > 0 {
		text += fmt.Sprintf(", compressed to %s", bytesize.Text(p.Stored))
	}
	if _, _, unpacked := q.forms.Bytes(d); unpacked > 0 {
		text += ", with a copy that is served"
	}
	return text
}

func ownOf(p *dedupe.Packed) int64 {
	if p.Literals >= 0 {
		return p.Containers[p.Literals].Size
	}
	return p.Compressed
}
