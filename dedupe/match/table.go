package match

import (
	"math/bits"
	"sync"
)

// maxAnchors bounds the anchors of a target that are held at a time: 16 bytes each in lists, 12 or
// less in the table. Larger targets keep fewer anchors in each MiB, and lose nothing but matches
// that are as much shorter: so many that there are usualAnchors with random bytes.
const (
	maxAnchors   = 3 << 19
	usualAnchors = 1 << 20
)

// denseAnchors is up to how many a target has more than the sparse ones. With
// four times as many the table would be larger than what is left of a core's
// cache, and what context binaries share is found to 0.01 % all the same.
const denseAnchors = 1 << 18

const (
	// positions that are kept for one key: copies were found before, the rest are headers and
	// padding
	maxSame  = 4
	maxProbe = 32 // slots that are looked at for a key, whatever the keys are
)

// table finds the positions of a key. One goroutine fills it before many read it.
type table struct {
	slots []uint64 // 0: free; else a key's tag above a position plus 1
	used  int      // of them
	at    int      // bits of a slot that have the position
}

// The table of a target of some TB cannot grow: tags are too short to show where keys belong.
const (
	minSlots = 1 << 4
	maxBits  = 21
	maxSlots = 1 << maxBits
)

// newTable makes a table for n anchors, which grows with more.
func newTable(n, size int64) *table {
	t := &table{at: bits.Len64(uint64(size))}
	slots := minSlots
	for slots < maxSlots && (int64(slots) < n+n/2 || t.at+maxBits > 64) {
		slots *= 2
	}
	t.slots = newSlots(slots)
	return t
}

// unused has slots of old tables, because the system gives new memory out page by page.
var unused sync.Pool // of *[]uint64

// newSlots returns n free slots. They are written even where they come from the
// system as zeros: touch reads them first, and a page that was read before it is
// written costs the system twice, and interrupts the other cores.
func newSlots(n int) []uint64 {
	if p, ok := unused.Get().(*[]uint64); ok && cap(*p) >= n {
		s := (*p)[:n]
		clear(s)
		return s
	}
	s := make([]uint64, n)
	clear(s)
	return s
}

// release returns the slots. The table must not be read afterwards.
func (t *table) release() {
	s := t.slots
	t.slots = nil
	unused.Put(&s)
}

// tagged returns a key's tag above a position: hash bits that neither levels nor sketches use.
func (t *table) tagged(key uint64) uint64 {
	h := key * 0xD6E8FEB86659FD93
	return (h ^ h>>32) << t.at
}

func (t *table) slot(tag uint64) int { return int(tag>>t.at) & (len(t.slots) - 1) }

// touch fetches the slots of many keys at once, because each alone would be waited for.
func (t *table) touch(anchors []anchor) (sum uint64) {
	for _, a := range anchors {
		sum |= t.slots[t.slot(t.tagged(a.key))]
	}
	return sum
}

// insert adds a position; where the table is full, it is left out.
func (t *table) insert(a anchor) {
	if t.used >= len(t.slots)/3*2 && len(t.slots) < maxSlots {
		t.grow()
	}
	t.put(t.tagged(a.key) | uint64(a.at+1))
}

func (t *table) put(one uint64) {
	slot, same := t.slot(one), 0
	for i := range maxProbe {
		s := &t.slots[(slot+i)&(len(t.slots)-1)]
		if *s == 0 {
			*s = one
			t.used++
			return
		}
		if *s>>t.at == one>>t.at {
			if same++; same == maxSame {
				return
			}
		}
	}
}

// grow doubles the table, from behind a free slot, so that positions of a key keep their order.
func (t *table) grow() {
	old := t.slots
	t.slots, t.used = newSlots(2*len(old)), 0
	first := 0
	for old[first] != 0 {
		first++
	}
	for i := range old {
		if one := old[(first+i)&(len(old)-1)]; one != 0 {
			t.put(one)
		}
	}
}

// lookup appends the positions of a key, and at times another's, to found.
func (t *table) lookup(key uint64, found []int64) []int64 {
	tag := t.tagged(key)
	slot := t.slot(tag)
	for i := range maxProbe {
		s := t.slots[(slot+i)&(len(t.slots)-1)]
		if s == 0 {
			return found
		}
		if s>>t.at == tag>>t.at {
			found = append(found, int64(s&(1<<t.at-1))-1)
		}
	}
	return found
}
