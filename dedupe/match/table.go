package match

import (
	"math/bits"
	"sync"
)

// maxAnchors bounds the anchors of a target that are held at a time: 16 bytes each in lists, 12 or
// less in the table. Larger targets keep fewer anchors per MiB, so that random bytes have
// usualAnchors, and only miss short matches.
const (
	maxAnchors   = 3 << 19
	usualAnchors = 1 << 20
)

// denseAnchors is the number of anchors up to which a target uses dense ones. Four times as many
// would not fit into a core's cache, and would find only 0.01 % more shared bytes in context
// binaries.
const denseAnchors = 1 << 18

const (
	// maxSame is how many positions are kept for one key. More are useless, because copies were
	// found before, and the rest are headers and padding.
	maxSame  = 4
	maxProbe = 32 // slots that are probed for a key
)

// table finds the positions of a key. One goroutine fills it before many read it.
type table struct {
	slots []uint64 // 0: free; else a key's tag above a position plus 1
	used  int      // number of used slots
	at    int      // number of a slot's bits that have the position
}

// The table of a target of several TB cannot grow, because its tags are too short to rehash keys.
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

// unused has slots of old tables for reuse, because the system provides new memory slowly, page by
// page.
var unused sync.Pool // of *[]uint64

// newSlots returns n free slots. It writes them even if the system has zeroed them: touch would
// read them first, and a page that is read before it is written costs two page faults, and
// interrupts the other cores.
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

// touch loads the slots of many keys into the cache at once, because loading them one by one is
// slow.
func (t *table) touch(anchors []anchor) (sum uint64) {
	for _, a := range anchors {
		sum |= t.slots[t.slot(t.tagged(a.key))]
	}
	return sum
}

// insert adds a position, unless the table is full.
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

// grow doubles the table. It begins after a free slot, so that the positions of a key keep their
// order.
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

// lookup appends the positions of a key to found, sometimes with positions of another key.
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
