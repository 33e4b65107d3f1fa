package evict

import (
	"fmt"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// model is a store as a set of builds and blobs, in which what takes space is found by going
// through all of it, every time: slow, and plain to see.
type model struct {
	at     time.Time
	builds []index.Brief
	others []index.Brief // that are not to be collected, and need blobs as well
	blobs  []modelBlob
	spared map[index.BuildID]string
	pinned map[index.BuildID]bool
	not    map[index.BuildID]string
	byUser map[uint32]int64 // being stored
}

type modelBlob struct {
	whole, recipe, unpacked int64 // bytes on disk; 0: there is none
	takes                   []int
	saving                  int64
	from                    []int
}

func blobDigest(i int) cas.Digest { return cas.Digest{byte(i), byte(i >> 8), 1} }

var present = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

const day = 24 * time.Hour

// drawModel makes up a store in which every recipe is a needed blob's, and takes from whole blobs
// that are not packed themselves.
func drawModel(t *rapid.T) *model {
	m := &model{at: present, spared: make(map[index.BuildID]string),
		pinned: make(map[index.BuildID]bool), not: make(map[index.BuildID]string),
		byUser: make(map[uint32]int64)}
	count := func(most int, what string) int { return rapid.IntRange(0, most).Draw(t, what) }
	bytes := func(what string) int64 { return rapid.Int64Range(1, 100).Draw(t, what) }
	m.blobs = make([]modelBlob, 1+count(11, "blobs"))
	needed := make([]bool, len(m.blobs))
	for i := range 1 + count(11, "builds") {
		b := index.Brief{ID: index.BuildID{byte(i + 1)},
			RequestKey: index.RequestKey{byte(count(6, "key"))}, Scope: "shared",
			UID:            uint32(count(2, "user")),
			Created:        present.Add(-time.Duration(count(60, "age")) * day),
			CompileSeconds: float64(count(9, "seconds")), LogicalBytes: bytes("logical"),
			ModelDigest: cas.Digest{byte(count(3, "model"))}}
		if count(1, "used") == 1 {
			b.Use = index.Usage{Hits: uint64(count(9, "hits")),
				Last: b.Created.Add(time.Duration(count(60, "later")) * day)}
			if b.Use.Last.After(present) {
				b.Use.Last = present
			}
		}
		for range 1 + count(2, "files") {
			if at := uint32(count(len(m.blobs)-1, "blob")); !slices.Contains(b.Blobs, at) {
				b.Blobs, needed[at] = append(b.Blobs, at), true
			}
		}
		if count(5, "of others") == 0 {
			m.others = append(m.others, b)
			continue
		}
		m.builds = append(m.builds, b)
		switch count(9, "fate") {
		case 0:
			m.spared[b.ID] = "in use"
		case 1:
			m.spared[b.ID], m.pinned[b.ID] = "pinned", true
		case 2:
			m.not[b.ID] = "invalid"
		}
	}
	var whole []int
	for i := range m.blobs {
		m.blobs[i].whole = bytes("disk")
		if !needed[i] || count(2, "packed") > 0 {
			whole = append(whole, i)
		}
	}
	some := func(among []int, but int, what string) (out []int) {
		for range 1 + count(1, what) {
			if i := rapid.SampledFrom(among).Draw(t, what); i != but && !slices.Contains(out, i) {
				out = append(out, i)
			}
		}
		return out
	}
	taken := make([]bool, len(m.blobs))
	for i := range m.blobs {
		if b := &m.blobs[i]; len(whole) > 0 && !slices.Contains(whole, i) {
			b.whole, b.recipe, b.takes = 0, bytes("recipe"), some(whole, i, "takes")
			if count(1, "unpacked") == 1 {
				b.unpacked = bytes("copy")
			}
			for _, base := range b.takes {
				taken[base] = true
			}
		}
	}
	whole = slices.DeleteFunc(whole, func(i int) bool {
		if !needed[i] && !taken[i] {
			m.blobs[i].whole = 0 // it would not have been kept
		}
		return m.blobs[i].whole == 0
	})
	for i := range m.blobs {
		if b := &m.blobs[i]; b.whole > 0 && needed[i] && len(whole) > 0 &&
			count(1, "may pack") == 1 {
			b.saving, b.from = rapid.Int64Range(0, b.whole-1).Draw(t, "saving"),
				some(whole, i, "from")
		}
	}
	for uid := range uint32(3) {
		if count(3, "storing") == 0 {
			m.byUser[uid] = bytes("stored")
		}
	}
	return m
}

// inventory is the model's, as a cache would take it.
func (m *model) inventory() *Inventory {
	s := &index.Survey{Blobs: make([]index.Blob, 0, len(m.blobs)), At: make(map[cas.Digest]uint32)}
	needs := func(i int) (n uint32) {
		for _, b := range slices.Concat(m.builds, m.others) {
			if slices.Contains(b.Blobs, uint32(i)) {
				n++
			}
		}
		return n
	}
	// those that no build needs keep their places too: the builds' numbers are places
	for i := range m.blobs {
		s.Blobs = append(s.Blobs,
			index.Blob{Size: m.blobs[i].whole, Disk: m.blobs[i].whole, Needs: needs(i)})
		s.At[blobDigest(i)] = uint32(i)
	}
	inv := NewInventory(s, func(d cas.Digest) int64 { panic(fmt.Sprint("unknown blob ", d)) })
	digests := func(places []int) (out []cas.Digest) {
		for _, i := range places {
			out = append(out, blobDigest(i))
		}
		return out
	}
	for i, b := range m.blobs {
		if b.recipe > 0 {
			inv.AddRecipe(blobDigest(i), b.recipe, digests(b.takes)...)
		}
		if b.unpacked > 0 {
			inv.AddCopy(blobDigest(i), b.unpacked)
		}
		if b.saving > 0 {
			inv.AddSaving(blobDigest(i), b.saving, digests(b.from)...)
		}
	}
	return inv
}

func (m *model) needed(i int) bool {
	return slices.ContainsFunc(slices.Concat(m.builds, m.others), func(b index.Brief) bool {
		return slices.Contains(b.Blobs, uint32(i))
	})
}

// sweep removes what is not needed, and returns what everything takes then.
func (m *model) sweep() (sum int64) {
	taken := make([]bool, len(m.blobs))
	for i := range m.blobs {
		b := &m.blobs[i]
		if !m.needed(i) {
			b.recipe, b.unpacked, b.takes = 0, 0, nil
		}
		for _, base := range b.takes {
			taken[base] = true
		}
	}
	for i := range m.blobs {
		b := &m.blobs[i]
		if !m.needed(i) && !taken[i] {
			b.whole = 0
		}
		sum += b.whole + b.recipe + b.unpacked
	}
	return sum
}

// remove takes builds out.
func (m *model) remove(id index.BuildID) {
	m.builds = slices.DeleteFunc(slices.Clone(m.builds), func(b index.Brief) bool {
		return b.ID == id
	})
}

func (m *model) build(id index.BuildID) *index.Brief {
	return &m.builds[slices.IndexFunc(m.builds, func(b index.Brief) bool { return b.ID == id })]
}

// clone is a model that may be changed.
func (m *model) clone() *model {
	other := *m
	other.builds, other.blobs = slices.Clone(m.builds), slices.Clone(m.blobs)
	for i := range other.blobs {
		other.blobs[i].takes = slices.Clone(m.blobs[i].takes)
	}
	return &other
}
