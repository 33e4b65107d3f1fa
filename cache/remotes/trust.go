package remotes

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/trust"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/unixsock/wire"
)

// Intervals at which the trust document of a remote is read, while one is in effect and while none
// is.
const (
	trustEvery  = time.Hour
	trustRetry  = time.Minute
	trustBudget = 5 * time.Second // time of one read in the background
)

// keepTrust applies the trust documents at the start, each hour and after a reload, until the
// context ends. It does not wait for uploads, because these may take long.
func (rs *Remotes) keepTrust(ctx context.Context) {
	tick := time.NewTicker(trustEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		rs.applyTrust(ctx)
		select {
		case <-ctx.Done():
		case <-rs.reloaded:
		case <-tick.C:
		}
	}
}

// applyTrust reads the trust documents of all remotes, and withholds the builds that they revoke.
func (rs *Remotes) applyTrust(ctx context.Context) {
	var all []*portable.Key
	for _, r := range rs.all() {
		keys, _ := portable.ReadKeys(r.Trust) // the status reports the error
		all = append(all, keys...)
		rs.figuresOf(r.Name).trustNext.Store(0)
		rs.readTrust(ctx, &r, trustBudget)
	}
	if err := rs.Trust.Apply(ctx, all); err != nil && ctx.Err() == nil {
		rs.Log.Error("revoked builds are not withheld", "error", err)
	}
}

// readTrust reads the trust document of a remote, unless it was read lately or no root key is
// trusted. If a document is refused, the previous one stays in effect until it expires.
func (rs *Remotes) readTrust(ctx context.Context, r *Remote, budget time.Duration) {
	within, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	unlock, err := rs.reading.Lock(within, r.Name)
	if err != nil {
		return
	}
	defer unlock()
	f := rs.figuresOf(r.Name)
	if rs.Now().UnixNano() < f.trustNext.Load() {
		return
	}
	f.trustNext.Store(rs.Now().Add(trustEvery).UnixNano())
	keys, err := portable.ReadKeys(r.Trust)
	if err != nil || len(trust.Roots(keys)) == 0 {
		return // the next look-up reports the error
	}
	raw, err := rs.Client.Trust(within, r.Name)
	if err == nil {
		err = rs.Trust.Take(ctx, raw, keys)
	}
	if _, _, why := rs.Trust.State(keys); why != "" || err != nil {
		f.trustNext.Store(rs.Now().Add(trustRetry).UnixNano())
	}
	before := f.trustError.Swap(nil)
	if err == nil || ctx.Err() != nil || errors.Is(err, remote.ErrUnreachable) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, remote.ErrMissing) {
		return
	}
	text := textOf(err)
	f.trustError.Store(&text)
	if before == nil || *before != text {
		rs.Log.Warn("trust document refused", "remote", r.Name, "error", text)
		rs.Store.RecordEvent(index.Event{Kind: event.Trust, Text: "document of remote " + r.Name +
			" refused: " + text})
	}
}

// trustStatus sets the status fields of a remote's trust document.
func (rs *Remotes) trustStatus(r *Remote, out *wire.Remote) {
	keys, err := portable.ReadKeys(r.Trust)
	if err != nil {
		out.TrustError = wire.Valid(err.Error())
		return
	}
	sequence, expires, why := rs.Trust.State(keys)
	if refused := rs.figuresOf(r.Name).trustError.Load(); why == "" && refused != nil {
		why = *refused
	}
	out.TrustSequence, out.TrustError = sequence, wire.Valid(why)
	if sequence > 0 {
		out.TrustExpiresMs = wire.Milliseconds(expires)
	}
}

// revoked returns why a key's signature of a build does not count at a remote, "" if it does.
func (rs *Remotes) revoked(r *Remote, keyID string, build portable.Hash) string {
	keys, err := portable.ReadKeys(r.Trust)
	if err != nil {
		return ""
	}
	return rs.Trust.Why(keys, keyID, portable.Digest{}, build)
}

// ReadDocument returns the trust document of a remote, or an empty list if there is none.
func (rs *Remotes) ReadDocument(ctx context.Context, name string) ([][]byte, error) {
	if _, err := rs.byName(name); err != nil {
		return nil, err
	}
	raw, err := rs.Client.Trust(ctx, name)
	switch {
	case errors.Is(err, remote.ErrMissing):
		return nil, nil
	case err != nil:
		return nil, apierr.New(apierr.Unavailable, err, "trust document")
	}
	return [][]byte{raw}, nil
}

// PutDocument uploads a trust document to a remote, where it replaces the one with the digest over.
// It takes effect on this machine at once if its root key is trusted for the remote.
func (rs *Remotes) PutDocument(ctx context.Context, name string, raw []byte,
	over portable.Digest) error {
	r, err := rs.byName(name)
	if err != nil {
		return err
	}
	keys, err := portable.ReadKeys(r.Trust)
	if err == nil && len(trust.Roots(keys)) > 0 {
		_, _, err = rs.Trust.Parse(raw, keys)
	}
	if err != nil {
		return apierr.New(apierr.BadRequest, err, "trust document for remote %s", name).
			WithHint("sign it with a root key; trust of [remote.%s] has its public key", name)
	}
	put, err := rs.Client.PutTrust(ctx, name, raw, over)
	switch {
	case err != nil:
		return apierr.New(apierr.Unavailable, err, "trust document")
	case put == remote.Exists:
		return apierr.New(apierr.Busy, nil, "remote %s: another document was put at the same time",
			name).
			WithHint("retry")
	}
	rs.Configure()
	rs.readTrust(ctx, &r, trustBudget)
	return nil
}

// Documents returns the known trust documents, encoded, of the root keys in these files and of all
// remotes.
func (rs *Remotes) Documents(files []string) ([][]byte, error) {
	files = slices.Clone(files)
	for _, r := range rs.all() {
		files = append(files, r.Trust...)
	}
	slices.Sort(files)
	keys, err := portable.ReadKeys(slices.Compact(files))
	if err != nil {
		return nil, err
	}
	return rs.Trust.Known(keys), nil
}
