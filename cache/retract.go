package cache

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/views"
)

// departure is a build that is being removed, and what became of it.
type departure struct {
	build *index.Build
	why   string
	grace time.Duration // of those who were told a path of its view
	may   func() bool   // is asked right before it goes, when nobody can stop that any more; nil: it may

	view *views.View
	left func() // ends its being counted on the disk

	gone bool
	err  error // why not, or what could not be removed of it
}

// retract removes a build: first its manifest, which is the commit, then its view, then the blobs that nothing
// else needs. A crash in between leaves leftovers, which the next start removes.
func (c *Cache) retract(ctx context.Context, b *index.Build, why string, grace time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	one := []departure{{build: b, why: why, grace: grace}}
	return errors.Join(c.retractAll(one, func(*departure) {}), one[0].err)
}

// retractAll is retract of several builds, step by step for all of them: so they share the syncs, of which a build by itself needs about six. went is
// called when what nothing else needs of a build has no name any more. The error says that what was removed may come back after a crash, as leftovers.
func (c *Cache) retractAll(list []departure, went func(*departure)) error {
	gone := make([]index.Retraction, len(list))
	for i := range list {
		d := &list[i]
		gone[i] = index.Retraction{ID: d.build.ID, Why: d.why, May: func() bool {
			if d.may != nil && !d.may() {
				return false
			}
			d.view = c.views.Of(d.build) // before the index forgets where it is
			d.left = c.places.leave(c.wholeBytes(d.build))
			return true
		}}
	}
	c.index.RetractAll(gone)
	blobs := c.forms.Removal()
	for i := range list {
		d := &list[i]
		if d.gone, d.err = gone[i].Gone, gone[i].Err; d.gone {
			if d.view != nil {
				c.views.Drop(d.build.ID, d.view, d.grace)
			}
			c.views.DropCurrent(d.build.ID, d.grace) // it was made since: there was none, or that one was found not to be intact
			for _, f := range d.build.Blobs() {
				_, err := blobs.Remove(f.Digest)
				d.err = errors.Join(d.err, err)
			}
		}
		if d.left != nil {
			d.left()
		}
		if d.gone {
			went(d)
		}
	}
	c.views.Sweep()
	_, err := blobs.End()
	return err
}
