package cache

import (
	"context"
	"slices"

	"github.com/epcached/epcached/failure"
	"github.com/epcached/epcached/refusal"
)

// Failures lists the compiles that failed and are answered from memory, as far as the peer may know of them, the newest
// first.
func (c *Cache) Failures(ctx context.Context, p Peer) ([]failure.Failure, error) {
	if err := ctx.Err(); err != nil {
		return nil, refusal.New(refusal.Cancelled, err, "failures")
	}
	return c.failures.List(c.hears(p), nil), nil
}

// Retry forgets failures, so that the next request compiles again: those that the names mean, as in Show, or all of the
// peer's; for administrators all there are. It gives what was forgotten. A name that means nothing is an error.
func (c *Cache) Retry(ctx context.Context, p Peer, entries []string, all bool) ([]failure.Failure, error) {
	if err := ctx.Err(); err != nil {
		return nil, refusal.New(refusal.Cancelled, err, "retry")
	}
	if all == (len(entries) > 0) {
		return nil, refusal.New(refusal.BadRequest, nil, "retry: name entries, or say all")
	}
	known := c.failures.List(c.hears(p), nil)
	for _, name := range entries {
		if !slices.ContainsFunc(known, func(f failure.Failure) bool { return f.Means(name) }) {
			return nil, refusal.New(refusal.NotFound, nil, "no failure is remembered of %q", name).WithHint("epcachectl jobs lists those that are")
		}
	}
	return c.failures.List(c.hears(p), func(f *failure.Failure) bool { return all || slices.ContainsFunc(entries, f.Means) }), nil
}

// hears says of which failures the peer may hear.
func (c *Cache) hears(p Peer) failure.Audience {
	return failure.Audience{UID: p.UID, Scope: OwnScope(p), All: c.Administrator(p)}
}
