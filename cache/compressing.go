package cache

import (
	"context"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/index"
)

// Compressing is what is kept compressed, and what will be by itself. No plan of the collector has that: it is done when something has been cold for
// long, and not for room.
type Compressing struct {
	Files         uint64
	Bytes, Stored int64 // what comes out of what is compressed, and what it takes, recipes included
	Waiting       uint64
	WaitingBytes  int64     // of what may be compressed, where a sample gains
	Next          time.Time // when the first of it is cold enough; zero: there is nothing, or it is switched off
}

// Compressing tells of the files of builds that the peer may change.
func (c *Cache) Compressing(ctx context.Context, p Peer) (out Compressing, err error) {
	c.flushUses()
	err = c.forms.EachPacked(ctx, func(d cas.Digest, packed dedupe.Packed) error {
		if packed.Compressed > 0 && c.mayChangeAny(p, d) {
			out.Files++
			out.Bytes += packed.Compressed
			out.Stored += packed.Stored
		}
		return nil
	})
	if err != nil {
		return out, searchError(ctx, err)
	}
	all, err := c.forms.Compressibles(ctx)
	if err != nil {
		return out, searchError(ctx, err)
	}
	when := c.settings.Load().pack
	off := when.when == PackOff || when.compressAfter <= 0
	all = slices.DeleteFunc(all, func(x forms.Compressible) bool { return !c.mayChangeAny(p, x.Blob) || c.anyPinned(x.Blob) })
	for _, x := range all {
		out.Waiting++
		out.WaitingBytes += x.Size
		if at := c.lastNeeded(x.Blob).Add(when.compressAfter); !off && (out.Next.IsZero() || at.Before(out.Next)) {
			out.Next = at
		}
	}
	return out, nil
}

// mayChangeAny tells whether some build that needs a blob is the peer's to change.
func (c *Cache) mayChangeAny(p Peer, d cas.Digest) bool {
	ids, err := c.index.Needs(d)
	return err == nil && slices.ContainsFunc(ids, func(id index.BuildID) bool {
		b, err := c.index.Get(id)
		return err == nil && c.mayChange(p, &b)
	})
}

// anyPinned tells whether some build that needs a blob is pinned.
func (c *Cache) anyPinned(d cas.Digest) bool {
	ids, err := c.index.Needs(d)
	return err != nil || slices.ContainsFunc(ids, func(id index.BuildID) bool { _, pinned := c.index.Pinned(id); return pinned })
}
