package match

import "sort"

// match is a range of the target whose bytes stand at from in another source,
// or earlier in the target itself.
type match struct {
	at, from, length int64
	source           int // index of the candidate
}

func (m match) end() int64 { return m.at + m.length }

func (m match) continues(before match) bool {
	return m.source == before.source && m.at == before.end() && m.from == before.from+before.length
}

// cover is what of the target is found: matches in order that do not overlap.
type cover []match

func (c cover) has(off int64) bool {
	i := sort.Search(len(c), func(i int) bool { return c[i].end() > off })
	return i < len(c) && c[i].at <= off
}

func (c cover) bytes() (n int64) {
	for _, m := range c {
		n += m.length
	}
	return n
}

// add returns the cover with further matches, in any order, which lose what is
// covered already, and then what an earlier and longer one of them has.
func (c cover) add(more []match, least int64) cover {
	sort.Slice(more, func(i, j int) bool {
		a, b := more[i], more[j]
		if a.at != b.at {
			return a.at < b.at
		}
		return a.length > b.length
	})
	out := make(cover, 0, len(c)+len(more))
	end := int64(0) // of what is laid, or was there
	k := 0          // the first of c that ends after the position
	for _, m := range more {
		at := max(m.at, end)
		for at < m.end() {
			for k < len(c) && c[k].end() <= at {
				out = out.push(c[k])
				k++
			}
			stop := m.end()
			if k < len(c) {
				if c[k].at <= at {
					at = c[k].end()
					end = max(end, at)
					continue
				}
				stop = min(stop, c[k].at)
			}
			if stop-at >= least || out.continuedBy(m.cut(at, stop)) {
				out = out.push(m.cut(at, stop))
			}
			at = stop
			end = max(end, at)
		}
	}
	for ; k < len(c); k++ {
		out = out.push(c[k])
	}
	return out
}

func (m match) cut(at, end int64) match {
	return match{at: at, from: m.from + at - m.at, length: end - at, source: m.source}
}

func (c cover) continuedBy(m match) bool { return len(c) > 0 && m.continues(c[len(c)-1]) }

func (c cover) push(m match) cover {
	if c.continuedBy(m) {
		c[len(c)-1].length += m.length
		return c
	}
	return append(c, m)
}
