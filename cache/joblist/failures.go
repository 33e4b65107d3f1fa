package joblist

import (
	"context"
	"slices"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/internal/apierr"
)

// Failures lists the failed compiles that are answered from memory and that the peer may know of,
// the newest first.
func (l *List) Failures(ctx context.Context, p request.Peer) ([]failure.Failure, error) {
	if err := ctx.Err(); err != nil {
		return nil, apierr.New(apierr.Cancelled, err, "failures")
	}
	return l.Remembered(p), nil
}

// Retry forgets failures, so that the next request compiles again: those that the names mean, or
// all of the peer's; for administrators all there are. It returns the forgotten ones. A name that
// means none is an error.
func (l *List) Retry(ctx context.Context, p request.Peer, entries []string, all bool) (
	[]failure.Failure, error) {
	if err := ctx.Err(); err != nil {
		return nil, apierr.New(apierr.Cancelled, err, "retry")
	}
	if all == (len(entries) > 0) {
		return nil, apierr.New(apierr.BadRequest, nil, "retry: name entries, or say all")
	}
	known := l.Remembered(p)
	for _, name := range entries {
		if !slices.ContainsFunc(known, func(f failure.Failure) bool { return f.Means(name) }) {
			return nil, apierr.New(apierr.NotFound, nil, "no failure is remembered of %q", name).
				WithHint("epcachectl jobs lists those that are")
		}
	}
	return l.Failed.List(l.hears(p), func(f *failure.Failure) bool {
		return all || slices.ContainsFunc(entries, f.Means)
	}), nil
}

// Remembered is Failures without a context.
func (l *List) Remembered(p request.Peer) []failure.Failure {
	return l.Failed.List(l.hears(p), nil)
}

// hears says of which failures the peer may hear.
func (l *List) hears(p request.Peer) failure.Audience {
	return failure.Audience{UID: p.UID, Scope: rights.OwnScope(p), All: l.Rights.Administrator(p)}
}
