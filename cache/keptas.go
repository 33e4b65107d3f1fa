package cache

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/index"
)

// keptAs says how the large files of a build are kept on the disk, and whether and when that is compressed by itself, or why not.
func (c *Cache) keptAs(ctx context.Context, b *index.Build) string {
	said := make(map[string]int64) // with the bytes of whom it is said
	for d, size := range distinctBlobs(b) {
		if size < forms.Least {
			continue
		}
		said[c.formText(d)+"; "+c.compressText(ctx, d)] += size
	}
	texts := slices.SortedFunc(maps.Keys(said), func(a, b string) int { return cmp.Or(cmp.Compare(said[b], said[a]), strings.Compare(a, b)) })
	for i, text := range texts {
		if len(texts) > 1 {
			texts[i] = bytesText(said[text]) + " " + text
		}
	}
	if len(texts) == 0 {
		return c.formWord(b)
	}
	return strings.Join(texts, "; ")
}

// formWord says in a word how a build is kept: whole, packed or compressed, by what is most changed of its files. A copy is the unpacked form
// beside it that requests are served from.
func (c *Cache) formWord(b *index.Build) string {
	word, copied := "whole", false
	for d := range distinctBlobs(b) {
		if !c.forms.OnlyPacked(d) {
			continue
		}
		_, _, unpacked := c.forms.Bytes(d)
		copied = copied || unpacked > 0
		if p, _ := c.forms.Packed(d); p.Compressed > 0 {
			word = "compressed"
		} else if word == "whole" {
			word = "packed"
		}
	}
	if copied {
		word += ", with a copy"
	}
	return word
}

func (c *Cache) formText(d cas.Digest) string {
	p, packed := c.forms.Packed(d)
	if !packed || !c.forms.OnlyPacked(d) {
		return "whole"
	}
	text := fmt.Sprintf("packed, %s of %s its own", bytesText(ownOf(&p)), bytesText(p.Size))
	if _, _, unpacked := c.forms.Bytes(d); unpacked > 0 {
		text += ", with a copy that is served"
	}
	return text
}

// ownOf is how many bytes of a packed file stand nowhere else.
func ownOf(p *dedupe.Packed) int64 {
	if p.Literals >= 0 {
		return p.Containers[p.Literals].Size
	}
	return p.Compressed
}

func (c *Cache) compressText(ctx context.Context, d cas.Digest) string {
	state, x, err := c.forms.CompressingOf(ctx, d)
	if err != nil {
		return "whether it can be compressed is not known: " + err.Error()
	}
	switch state {
	case forms.IsCompressed:
		p, _ := c.forms.Packed(d)
		return fmt.Sprintf("compressed since %s, %s to %s, recipe included", c.forms.PackedSince(d).UTC().Format(time.RFC3339), bytesText(p.Compressed), bytesText(p.Stored))
	case forms.IsDense:
		return "compressing was tried, and gains too little"
	case forms.IsTakenFrom:
		return "not compressed: others take bytes of it, or would when they are packed"
	case forms.NotCompressible:
		return "nothing of it is compressed"
	case forms.MayBe:
	}
	when := c.settings.Load().pack
	switch {
	case when.when == PackOff || when.compressAfter <= 0:
		return "not compressed by itself: that is switched off"
	case c.anyPinned(d):
		return "not compressed: it is pinned"
	}
	at := c.lastNeeded(d).Add(when.compressAfter)
	if !at.After(c.now()) {
		return fmt.Sprintf("to be compressed soon, where a sample of its %s gains an eighth", bytesText(x.Size))
	}
	return fmt.Sprintf("to be compressed from %s on, unless it is used before, where a sample of its %s gains an eighth", at.UTC().Format(time.RFC3339), bytesText(x.Size))
}

// lastNeeded is when any build that needs a blob was last used, or made.
func (c *Cache) lastNeeded(d cas.Digest) (last time.Time) {
	ids, err := c.index.Needs(d)
	if err != nil {
		return c.now() // whoever needs it finds out
	}
	for _, id := range ids {
		used, _ := c.index.LastUse(id)
		if b, err := c.index.Get(id); err == nil && used.Before(b.Created) {
			used = b.Created
		}
		if used.After(last) {
			last = used
		}
	}
	return last
}
