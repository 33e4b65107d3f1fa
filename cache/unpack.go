package cache

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
)

// phaseUnpacking is the phase of a request that waits for the unpacked form of a packed build.
const phaseUnpacking = "unpacking"

// unpackAll makes the unpacked form of each of the build's packed files.
func (c *Cache) unpackAll(ctx context.Context, b *index.Build, phase func(string)) error {
	begins, progress := func() { phase(phaseUnpacking) }, unpackProgress(ctx)
	for i := range b.Files {
		if f := &b.Files[i]; c.forms.OnlyPacked(f.Digest) {
			noRoom := c.roomForCopy(ctx, f.Size)
			err := c.forms.Unpack(ctx, f.Digest, begins, progress)
			if errors.Is(err, packing.ErrNoRoom) && noRoom != nil {
				err = noRoom // it has more to say
			}
			if err != nil {
				return fmt.Errorf("%s: %w", f.Name, err)
			}
		}
	}
	return nil
}

// roomForCopy evicts what may be evicted for an unpacked copy. The copy's own reservation is made
// while its blob is locked, and evicts nothing.
func (c *Cache) roomForCopy(ctx context.Context, size int64) error {
	if _, apart := c.forms.Copies.Folder(); apart {
		return nil
	}
	place := &reservation{c: c}
	defer place.release()
	return place.resizeTo(ctx, true, cas.OnDisk(size), 0)
}

// noCopy is the answer to who asks for a build of which there is no room for a copy: a compile would have none either.
func noCopy(b *index.Build, err error) error {
	return storeError(fmt.Errorf("it is kept packed, and there is no room to unpack it: %w", err), b.ModelName)
}

type tellingKey struct{}

// withTelling has what is done for a request tell how far it is.
func withTelling(ctx context.Context, t *telling) context.Context {
	if t == nil {
		return ctx
	}
	return context.WithValue(ctx, tellingKey{}, t)
}

// unpackProgress tells who waits how many bytes are there.
func unpackProgress(ctx context.Context) func(done, total int64) {
	t, _ := ctx.Value(tellingKey{}).(*telling)
	if t == nil {
		return nil
	}
	return func(done, total int64) { t.tell(Progress{Phase: phaseUnpacking, Done: done, Total: total}) }
}

// viewOf gives the build's view with every file checked: the one in use, the one of an earlier run, or a new one, for which what is packed is
// unpacked.
func (c *Cache) viewOf(ctx context.Context, b *index.Build, phase func(string)) (*views.View, error) {
	if v := c.views.Sound(b.ID); v != nil {
		return v, nil
	}
	for attempt := 1; ; attempt++ {
		if err := c.unpackAll(ctx, b, phase); err != nil {
			return nil, err
		}
		v, err := c.views.Get(ctx, b, func() { phase("verifying") })
		if !errors.Is(err, cas.ErrNotFound) || attempt == mendAttempts || !c.views.Unpacks(b) {
			return v, err
		}
		// It was packed just now, or what was unpacked is gone already.
	}
}

// mendAttempts bounds how often a view is begun anew because a form of one of its blobs went meanwhile.
const mendAttempts = 3
