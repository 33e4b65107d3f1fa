package lookup

import (
	"context"
	"errors"
	"io/fs"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/views"
)

// Unpacking is the phase of a request that waits for the unpacked form of a packed build.
const Unpacking = "unpacking"

// Lease takes a lease on the build's view, after every file of it was compared with what was verified.
func Lease(ctx context.Context, st *store.Store, b *index.Build, phase func(string)) (*request.Answer, error) {
	done, err := st.Take(b.ID)
	if err != nil {
		return nil, err
	}
	defer done()
	for attempt := 0; ; attempt++ {
		v, err := View(ctx, st, b, phase)
		if err != nil {
			return nil, st.GoneMeanwhile(b.ID, err)
		}
		a, err := Leased(b, v)
		if errors.Is(err, fs.ErrNotExist) && attempt < 3 {
			// Removed, or being removed, between the check and the lease.
			st.Views().Drop(b.ID, v, 0)
			continue
		}
		return a, err
	}
}

// Leased answers with a lease on the view.
func Leased(b *index.Build, v *views.View) (*request.Answer, error) {
	f, err := v.Lease()
	if err != nil {
		return nil, err
	}
	return &request.Answer{Build: b, View: f, Path: v.Path(), Graph: v.GraphPath(), LeasedView: v}, nil
}

// View returns the build's view, and reports progress to the request that waits for it.
func View(ctx context.Context, st *store.Store, b *index.Build, phase func(string)) (*views.View, error) {
	return st.View(ctx, b, store.Phases{Phase: phase, Unpacked: unpackProgress(ctx)})
}

type tellingKey struct{}

// WithTelling returns a context that reports how far the unpacking for a request is.
func WithTelling(ctx context.Context, t *jobs.Telling) context.Context {
	if t == nil {
		return ctx
	}
	return context.WithValue(ctx, tellingKey{}, t)
}

// unpackProgress returns what is called with the bytes that are unpacked; nil: no request waits.
func unpackProgress(ctx context.Context) func(done, total int64) {
	t, _ := ctx.Value(tellingKey{}).(*jobs.Telling)
	if t == nil {
		return nil
	}
	return func(done, total int64) { t.Tell(request.Progress{Phase: Unpacking, Done: done, Total: total}) }
}
