package cache

import (
	"cmp"
	"context"
	"slices"

	"github.com/epcached/epcached/refusal"
)

// Failures lists the compiles that failed and are answered from memory, as far as the peer may know of them, the newest
// first.
func (c *Cache) Failures(ctx context.Context, p Peer) ([]Failure, error) {
	if err := ctx.Err(); err != nil {
		return nil, refusal.New(refusal.Cancelled, err, "failures")
	}
	return c.failures.list(c.knows(p), nil), nil
}

// Retry forgets failures, so that the next request compiles again: those that the names mean, as in Show, or all of the
// peer's; for administrators all there are. It gives what was forgotten. A name that means nothing is an error.
func (c *Cache) Retry(ctx context.Context, p Peer, entries []string, all bool) ([]Failure, error) {
	if err := ctx.Err(); err != nil {
		return nil, refusal.New(refusal.Cancelled, err, "retry")
	}
	if all == (len(entries) > 0) {
		return nil, refusal.New(refusal.BadRequest, nil, "retry: name entries, or say all")
	}
	known := c.failures.list(c.knows(p), nil)
	for _, name := range entries {
		if !slices.ContainsFunc(known, func(f Failure) bool { return f.meant(name) }) {
			return nil, refusal.New(refusal.NotFound, nil, "no failure is remembered of %q", name).WithHint("epcachectl jobs lists those that are")
		}
	}
	return c.failures.list(c.knows(p), func(f *Failure) bool { return all || slices.ContainsFunc(entries, f.meant) }), nil
}

// knows gives what of a failure the peer may know, nil for nothing. Others' names for a model are theirs.
func (c *Cache) knows(p Peer) func(*remembered) *Failure {
	administrator := c.Administrator(p)
	return func(r *remembered) *Failure {
		name, asked := r.askers[p.UID]
		switch {
		case administrator || r.UID == p.UID || r.Scope == OwnScope(p):
			return r.as(r.ModelName)
		case asked:
			return r.as(name)
		}
		return nil
	}
}

// list gives the failures that know gives, the newest first, and forgets those that forget is true of.
func (fs *failures) list(know func(*remembered) *Failure, forget func(*Failure) bool) []Failure {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	var out []Failure
	for key, one := range fs.known {
		f := know(one)
		if f == nil || forget != nil && !forget(f) {
			continue
		}
		out = append(out, *f)
		if forget != nil {
			fs.drop(key)
			delete(fs.told, toldFailure{f.RequestKey, one.UID, f.Reason})
		}
	}
	slices.SortFunc(out, func(a, b Failure) int {
		return cmp.Or(b.Last.Compare(a.Last), slices.Compare(a.BuildKey[:], b.BuildKey[:]))
	})
	return out
}
