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
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// Space returns the account of the whole store.
func (q *Queries) Space() (*wire.Space, error) {
	b, err := q.store.Bounds()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "space")
	}
	s, held, packed, err := q.spaceAtOnce()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "space")
	}
	counters := q.index.Counters.All()
	return &wire.Space{LogicalBytes: s.LogicalBytes, UniqueBytes: s.UniqueBytes,
		SavedBySharingBytes: s.LogicalBytes - s.UniqueBytes, Entries: s.Entries, Builds: s.Builds,
		DiskBytes: s.DiskBytes + packed.Recipes + packed.Containers, UnpackedBytes: packed.Copies,
		ManifestBytes: s.ManifestBytes, HeldBytes: held, ReservedBytes: q.store.Ledger().Reserved().Disk,
		PinnedBytes: q.diskOf(q.index.Journal.PinnedBuilds()), DeadBytes: q.diskOf(q.index.Journal.NotServed()),
		BudgetBytes: b.Budget, FloorBytes: b.Floor, FreeBytes: b.Free, MaxEntries: b.Entries,
		Evicted: counters["evicted"], Unkept: counters["unkept"],
		ToLookAt: uint64(q.store.Packer().Left())}, nil
}

// spaceAtOnce reads three accounts as of one moment, as far as possible: a build that is removed
// meanwhile would be counted twice, as stored, and as open or needed by others. A blob that is being
// packed counts as what it takes now.
func (q *Queries) spaceAtOnce() (s index.Space, held int64, packed packing.Space, err error) {
	var before, after moment
	for range 10 { // always something going: as near as it gets
		if before, err = q.moment(); err != nil {
			return s, 0, packed, err
		}
		if packed, err = q.forms.Space(true); err != nil {
			return s, 0, packed, err
		}
		if after, err = q.moment(); err != nil {
			return s, 0, packed, err
		}
		if after == before {
			break
		}
	}
	after.space.DiskBytes -= after.ahead
	return after.space, after.held, packed, nil
}

// moment are the figures that change whenever bytes move from one account to another.
type moment struct {
	space       index.Space
	held, ahead int64
}

func (q *Queries) moment() (m moment, err error) {
	if m.space, err = q.index.Space(); err != nil {
		return m, err
	}
	m.held = q.store.Views().HeldBytes()
	m.ahead, err = q.forms.Ahead()
	return m, err
}

func (q *Queries) diskOf(ids []index.BuildID) (sum int64) {
	counted := make(map[cas.Digest]bool)
	for _, id := range ids {
		b, err := q.index.Get(id)
		if err != nil {
			continue // removed meanwhile
		}
		for d := range q.store.PartsOf(&b) {
			if !counted[d] {
				counted[d] = true
				sum += q.store.DiskBytesOf(d) // of one that is missing, none
			}
		}
	}
	return sum
}

// KeptText says how the large files of a build are kept on the disk.
func (q *Queries) KeptText(b *index.Build) string {
	said := make(map[string]int64) // with the bytes of whom it is said
	for d, size := range b.DistinctBlobs() {
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
	for d := range b.DistinctBlobs() {
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
