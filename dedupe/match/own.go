package match

// ownCopies goes through the target's segments in order, fills the table with their anchors, and
// finds what the target has twice: of that only the first is in the table.
type ownCopies struct {
	*matcher
	comparer
	spare  int64 // bytes that may still be compared in vain
	end    int64 // of the latest range that is a copy
	heard  int64 // the latest anchor
	quiet  quietRanges
	places []int64
	warm   uint64 // nothing; see table.touch
}

// done is called when all have come.
func (o *ownCopies) done() error {
	o.stats.scanned += o.target.Size()
	o.stats.compared += o.compared
	if err := o.quietUntil(o.target.Size()); err != nil {
		return err
	}
	o.own = o.own.add(o.quiet.search(), leastPiece)
	o.quiet, o.comparer = quietRanges{}, comparer{}
	return nil
}

// touchAhead is for how many anchors the table's slots are fetched at once.
const touchAhead = 128

func (o *ownCopies) segment(s segment) error {
	for i, a := range s.anchors {
		if i%touchAhead == 0 {
			o.warm |= o.table.touch(s.anchors[i:min(i+touchAhead, len(s.anchors))])
		}
		for len(s.runs) > 0 && s.runs[0].at <= a.at {
			if err := o.run(s.runs[0]); err != nil {
				return err
			}
			s.runs = s.runs[1:]
		}
		if err := o.quietUntil(a.at); err != nil {
			return err
		}
		if a.at < o.end {
			continue
		}
		found, err := o.anchor(a)
		if err != nil {
			return err
		}
		if !found {
			o.table.insert(a)
		}
	}
	for _, r := range s.runs {
		if err := o.run(r); err != nil {
			return err
		}
	}
	return nil
}

// run takes what repeats the first period of a run, which may go on in further segments.
func (o *ownCopies) run(r run) error {
	at := max(r.at+r.period, o.end)
	if at >= r.end() || o.spare <= 0 {
		return nil
	}
	before := o.compared
	found, err := o.copyOf(&o.comparer, at, at-r.period, o.end)
	if err != nil {
		return err
	}
	if found.length < o.floor {
		o.spare -= o.compared - before
		return nil
	}
	// A long run is no quiet range, but ends one; short ones are parts of it.
	if found.length >= longRun {
		if err := o.quietUntil(found.at); err != nil {
			return err
		}
		o.heard = found.end()
	}
	o.take(found)
	return nil
}

// anchor looks whether what stands around an anchor of the target stands earlier in it.
func (o *ownCopies) anchor(a anchor) (bool, error) {
	best := match{}
	o.places = o.table.lookup(a.key, o.places[:0])
	for _, from := range o.places {
		if o.spare <= 0 {
			break
		}
		before := o.compared
		found, err := o.copyOf(&o.comparer, a.at, from, o.end)
		if err != nil {
			return false, err
		}
		if found.length < o.floor {
			o.spare -= o.compared - before
		} else if found.length > best.length {
			best = found
		}
	}
	if best.length == 0 {
		return false, nil
	}
	o.take(best)
	return true, nil
}

func (o *ownCopies) take(found match) {
	o.own = o.own.push(found)
	o.end = found.end()
}

// copyOf extends what is the same at two positions of the target. It may
// overlap itself: then it is periodic.
func (m *matcher) copyOf(c *comparer, at, from, end int64) (match, error) {
	ahead, err := c.forward(m.target, from, m.target, at, m.target.Size()-at)
	if err != nil {
		return match{}, err
	}
	back, err := c.backward(m.target, from, m.target, at, min(from, at-end))
	return match{at: at - back, from: from - back, length: ahead + back}, err
}
