package dedupe

import "math/bits"

// maxAnchors bounds the anchors of a target that are held at a time: 16 bytes
// each in lists, 12 or less in the table. Larger targets keep fewer anchors in
// each MiB, and lose nothing but matches that are as much shorter: so many that
// there are usualAnchors with random bytes.
const (
	maxAnchors   = 3 << 19
	usualAnchors = 1 << 20
)

// denseAnchors is up to how many a target has more than the sparse ones. With
// four times as many the table would be larger than what is left of a core's
// cache, and what context binaries share is found to 0.01 % all the same.
const denseAnchors = 1 << 18

const (
	maxSame  = 4  // positions that are kept for one key: copies were found before, the rest are headers and padding
	maxProbe = 32 // slots that are looked at for a key, whatever the keys are
)

// table finds the positions of a key in the target. It is filled by one
// goroutine, and then read by many.
type table struct {
	slots []uint64 // 0: free; else a key's tag above a position plus 1
	at    int      // bits of a slot that have the position
	shift uint
}

// newTable has room for n anchors of a target of that size.
func newTable(n int, size int64) *table {
	k := uint(4)
	for 1<<k < n+n/2 && k < 21 {
		k++
	}
	return &table{slots: make([]uint64, 1<<k), at: bits.Len64(uint64(size)), shift: 64 - k}
}

// place returns the first slot of a key and the tag that stands there for it.
// Levels look at a key's lowest bits, sketches at whether it is small: both take
// their own from the product.
func (t *table) place(key uint64) (slot int, tag uint64) {
	h := key * 0xD6E8FEB86659FD93
	return int(h >> t.shift), h << t.at
}

// touch has the processor fetch the slots of many keys at once: one after the
// other each would be waited for, since the table is larger than a cache.
func (t *table) touch(anchors []anchor) (sum uint64) {
	for _, a := range anchors {
		sum |= t.slots[a.key*0xD6E8FEB86659FD93>>t.shift]
	}
	return sum
}

// insert adds a position; where there is no room for it, it is left out.
func (t *table) insert(a anchor) {
	slot, tag := t.place(a.key)
	same := 0
	for i := range maxProbe {
		s := &t.slots[(slot+i)&(len(t.slots)-1)]
		if *s == 0 {
			*s = tag | uint64(a.at+1)
			return
		}
		if *s>>t.at == tag>>t.at {
			if same++; same == maxSame {
				return
			}
		}
	}
}

// lookup appends the positions of a key, and at times another's, to found.
func (t *table) lookup(key uint64, found []int64) []int64 {
	slot, tag := t.place(key)
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
