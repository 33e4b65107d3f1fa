package dedupe

// maxAnchors bounds the anchors of a target that are held at a time: 16 bytes
// each in lists, 18 or less in the table. Larger targets keep fewer anchors in
// each MiB, and lose nothing but matches that are as much shorter.
const maxAnchors = 1 << 20

const (
	maxSame  = 4  // positions that are kept for one key: copies were found before, the rest are headers and padding
	maxProbe = 32 // slots that are looked at for a key, whatever the keys are
)

// table finds the positions of a key in the target. It is filled by one
// goroutine, and then read by many.
type table struct {
	tags  []uint32 // 0: free
	at    []int64
	shift uint
}

// newTable has room for n anchors.
func newTable(n int) *table {
	bits := uint(4)
	for 1<<bits < n+n/2 && bits < 21 {
		bits++
	}
	return &table{tags: make([]uint32, 1<<bits), at: make([]int64, 1<<bits), shift: 64 - bits}
}

// place returns the first slot of a key and what stands there for it. Levels
// look at a key's lowest bits, sketches at whether it is small: both take their
// own from the product.
func (t *table) place(key uint64) (slot int, tag uint32) {
	h := key * 0xD6E8FEB86659FD93
	return int(h >> t.shift), uint32(h) | 1
}

// insert adds a position; where there is no room for it, it is left out.
func (t *table) insert(a anchor) {
	slot, tag := t.place(a.key)
	same := 0
	for i := range maxProbe {
		k := (slot + i) & (len(t.tags) - 1)
		switch t.tags[k] {
		case 0:
			t.tags[k], t.at[k] = tag, a.at
			return
		case tag:
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
		k := (slot + i) & (len(t.tags) - 1)
		switch t.tags[k] {
		case 0:
			return found
		case tag:
			found = append(found, t.at[k])
		}
	}
	return found
}
