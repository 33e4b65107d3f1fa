package cache

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/index"
)

// idleFor is for how long a base must not have been used before another blob takes its place: an
// application that uses one build in the morning and another one in the afternoon shall not have
// them change places twice a day.
const idleFor = 24 * time.Hour

// compact has blobs that are used take the place of bases that are idle, and removes bases that no
// build needs.
func (s *sharing) compact(ctx context.Context, after time.Duration) error {
	hot := func(d cas.Digest) bool { return s.c.usedWithin(d, after) }
	idle := func(d cas.Digest) bool {
		cold, err := s.c.allCold(d, packWhen{when: PackCold, after: max(after, idleFor)})
		return err == nil && cold
	}
	all, err := s.c.forms.Families(ctx, hot, idle)
	if err != nil {
		return err
	}
	for _, f := range all {
		if s.futile[f] || !f.Base.IsZero() && !idle(f.Base) || !f.Hot.IsZero() && !hot(f.Hot) {
			continue
		}
		if err := s.gate(ctx); err != nil {
			return err
		}
		err := s.c.forms.Compact(ctx, f, s.gate)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !errors.Is(err, forms.ErrInUse) { // else another time
			s.futile[f] = true // until the next start
			s.c.log.Warn("blobs not compacted",
				"used", f.Hot.String(), "base", f.Base.String(), "error", err)
		}
	}
	return nil
}

// usedWithin reports whether some build that needs the blob was asked for in that time.
func (c *Cache) usedWithin(d cas.Digest, after time.Duration) bool {
	ids, err := c.index.Needs(d)
	if err != nil {
		return false // a request for it finds out
	}
	return slices.ContainsFunc(ids, func(id index.BuildID) bool {
		last, hits := c.index.LastUse(id)
		return hits > 0 && c.now().Sub(last) < after
	})
}
