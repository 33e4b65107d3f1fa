// Package exact finds all bytes that files share at any offset, slowly. It is the reference for
// dedupe's tests and make bench-space, and not part of any program.
//
// A Matcher records every offset of every file, with about ten bytes of memory for each new byte,
// and always compares bytes. New counts the fewest bytes that any matcher could store which stores
// files in the same order, without compression, and refers only to runs of a least length.
package exact

import (
	"bytes"
	"fmt"
	"sort"
)

// Matcher holds the files that were added. It is for one goroutine.
type Matcher struct {
	run   int
	power uint64 // factor^(run-1): weight of the byte that leaves the window
	files [][]byte
	ends  []int64 // end of each file in their concatenation
	slots []uint64
	used  int
}

// A slot of the table is 0 if it is unused. Otherwise its upper bits are the lower bits of a
// window's hash, and its lower bits are 1 + the window's position in the concatenated files.
const (
	placeBits = 40
	placeMask = 1<<placeBits - 1
	factor    = 0x9E3779B97F4A7C15
)

// NewMatcher returns a Matcher for runs of run bytes or more, with space for
// expect bytes that are new; it grows, but slowly.
func NewMatcher(run int, expect int64) *Matcher {
	m := &Matcher{run: run, power: 1}
	for range run - 1 {
		m.power *= factor
	}
	n := 1 << 10
	for int64(n)*3/4 < expect {
		n *= 2
	}
	m.slots = make([]uint64, n)
	return m
}

type Range struct{ At, Length int64 }

// Add returns the ranges of b that are new, in order: the bytes that are in no
// run of the least length that is also in a file added before, or in b at
// an earlier offset. b is kept and must not change.
func (m *Matcher) Add(b []byte) []Range {
	base := int64(0)
	if n := len(m.ends); n > 0 {
		base = m.ends[n-1]
	}
	if base+int64(len(b)) >= placeMask {
		panic(fmt.Sprintf("exact: more than %d bytes", int64(placeMask)))
	}
	m.files, m.ends = append(m.files, b), append(m.ends, base+int64(len(b)))
	var fresh []Range
	done := 0 // end of the part that is decided
	at := 0
	for hash := m.hash(b); at+m.run <= len(b); {
		place, found := m.find(hash, b[at:at+m.run])
		if !found {
			m.insert(hash, base+int64(at))
			if at+m.run < len(b) {
				hash = (hash-uint64(b[at])*m.power)*factor + uint64(b[at+m.run])
			}
			at++
			continue
		}
		if done < at {
			fresh = append(fresh, Range{int64(done), int64(at - done)})
		}
		n := commonPrefix(m.from(place), b[at:])
		done = at + n
		// The windows within the run are known, so they are not looked up.
		at = done - m.run + 1
		hash = m.hash(b[at:])
	}
	if done < len(b) {
		fresh = append(fresh, Range{int64(done), int64(len(b) - done)})
	}
	return fresh
}

// New adds b and returns how many of its bytes are new.
func (m *Matcher) New(b []byte) (n int64) {
	for _, r := range m.Add(b) {
		n += r.Length
	}
	return n
}

// hash returns the hash of the first window of b.
func (m *Matcher) hash(b []byte) (h uint64) {
	if len(b) < m.run {
		return 0
	}
	for _, c := range b[:m.run] {
		h = h*factor + uint64(c)
	}
	return h
}

func (m *Matcher) slot(hash uint64) (slot int, tag uint64) {
	mixed := (hash ^ hash>>32) * 0xD6E8FEB86659FD93
	return int(mixed>>20) & (len(m.slots) - 1), mixed << placeBits
}

// from returns the rest of the file that contains the position, beginning there.
func (m *Matcher) from(place int64) []byte {
	i := sort.Search(len(m.ends), func(i int) bool { return m.ends[i] > place })
	return m.files[i][int64(len(m.files[i]))-(m.ends[i]-place):]
}

func (m *Matcher) find(hash uint64, window []byte) (place int64, found bool) {
	for k, tag := m.slot(hash); m.slots[k] != 0; k = (k + 1) & (len(m.slots) - 1) {
		if m.slots[k]&^placeMask != tag {
			continue
		}
		place = int64(m.slots[k]&placeMask) - 1
		if bytes.Equal(m.from(place)[:m.run], window) {
			return place, true
		}
	}
	return 0, false
}

func (m *Matcher) insert(hash uint64, place int64) {
	if m.used >= len(m.slots)/4*3 {
		m.grow()
	}
	k, tag := m.slot(hash)
	for m.slots[k] != 0 {
		k = (k + 1) & (len(m.slots) - 1)
	}
	m.slots[k] = tag | uint64(place+1)
	m.used++
}

func (m *Matcher) grow() {
	old := m.slots
	m.slots, m.used = make([]uint64, 2*len(old)), 0
	for _, s := range old {
		if s != 0 {
			place := int64(s&placeMask) - 1
			m.insert(m.hash(m.from(place)), place)
		}
	}
}

func commonPrefix(a, b []byte) int {
	const block = 512
	n := min(len(a), len(b))
	i := 0
	for i+block <= n && bytes.Equal(a[i:i+block], b[i:i+block]) {
		i += block
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}
