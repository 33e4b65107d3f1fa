package cache

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/views"
)

// phaseUnpacking is the phase of a request that waits for the unpacked form of a packed build.
const phaseUnpacking = "unpacking"

// viewOf gives the build's view, and reports progress to the request that waits for it.
func (c *Cache) viewOf(ctx context.Context, b *index.Build, phase func(string)) (*views.View, error) {
	return c.store.View(ctx, b, store.Phases{Phase: phase, Unpacked: unpackProgress(ctx)})
}

// noCopy is the answer to who asks for a build of which there is no room for a copy: a compile would have none either.
func noCopy(b *index.Build, err error) error {
	return request.StoreError(fmt.Errorf("it is kept packed, and there is no room to unpack it: %w", err), b.ModelName)
}

type tellingKey struct{}

// withTelling has what is done for a request tell how far it is.
func withTelling(ctx context.Context, t *jobs.Telling) context.Context {
	if t == nil {
		return ctx
	}
	return context.WithValue(ctx, tellingKey{}, t)
}

// unpackProgress tells who waits how many bytes are there.
func unpackProgress(ctx context.Context) func(done, total int64) {
	t, _ := ctx.Value(tellingKey{}).(*jobs.Telling)
	if t == nil {
		return nil
	}
	return func(done, total int64) { t.Tell(request.Progress{Phase: phaseUnpacking, Done: done, Total: total}) }
}
