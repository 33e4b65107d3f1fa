// Package trust has the trust documents in effect: which keys and builds their root keys revoke,
// and until when builds of other machines are accepted. A document comes from a remote, or with a
// bundle. The journal keeps the highest sequence number of each root key, so that no earlier
// document takes effect again.
//
// Documents is safe for concurrent use. Start reading at Documents.Take.
package trust

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/store"
)

// Options are the dependencies of Documents.
type Options struct {
	Store *store.Store
	Now   func() time.Time
	Log   *slog.Logger
}

// Documents has the latest accepted document of each root key. Set its Options before use.
type Documents struct {
	Options

	keeping keyed.Locks[string] // of a root key, while its document is stored
	known   sync.Map            // *taken by the id of the root key; nil: there is none
}

type taken struct {
	raw []byte
	*portable.Document
}

// Roots returns the root keys among the keys. An expired one signs no document any more, and what
// its last one revokes stays revoked.
func Roots(keys []*portable.Key) []*portable.Key {
	return slices.DeleteFunc(slices.Clone(keys), func(k *portable.Key) bool { return !k.Root })
}

func (ds *Documents) expired(k *portable.Key) bool {
	return !k.NotAfter.IsZero() && ds.Now().After(k.NotAfter)
}

// Parse parses a trust document that a root key among the keys signed, which has not expired.
func (ds *Documents) Parse(raw []byte, keys []*portable.Key) (*portable.Document, *portable.Key,
	error) {
	return portable.ParseDocument("trust document", raw,
		slices.DeleteFunc(Roots(keys), ds.expired))
}

// memoKey is the key of the memo that keeps a document over restarts. If it is lost, no build of
// another machine is accepted until a document arrives.
func memoKey(root string) string { return "trust:" + root }

// document returns the document of a root key, nil if there is none.
func (ds *Documents) document(root *portable.Key) *taken {
	if d, read := ds.known.Load(root.ID); read {
		return d.(*taken)
	}
	var out *taken
	raw, _ := memo.Recall[[]byte](&ds.Store.Index().Memos, memoKey(root.ID))
	d, _, err := portable.ParseDocument("trust document", raw, []*portable.Key{root})
	if err == nil && d.Sequence >= ds.Store.Index().Journal.TrustSequence(root.ID) {
		out = &taken{raw, d}
	}
	found, _ := ds.known.LoadOrStore(root.ID, out)
	return found.(*taken)
}

// Known returns the documents of the root keys among the keys, encoded.
func (ds *Documents) Known(keys []*portable.Key) (raw [][]byte) {
	for _, root := range Roots(keys) {
		if d := ds.document(root); d != nil {
			raw = append(raw, d.raw)
		}
	}
	return raw
}

// Take puts a document in effect that a root key among the keys signed, and withholds the builds
// that it revokes. It refuses a document that is earlier than one seen before.
func (ds *Documents) Take(ctx context.Context, raw []byte, keys []*portable.Key) error {
	d, root, err := ds.Parse(raw, keys)
	if err != nil {
		return err
	}
	if fresh, err := ds.keep(ctx, root, raw, d); err != nil || !fresh {
		return err
	}
	ds.Store.RecordEvent(index.Event{Kind: event.Trust, Text: fmt.Sprintf(
		"document %d of root key %s counts until %s; revoked keys and builds: %d", d.Sequence,
		root.Short(), d.Expires.Format(time.RFC3339), len(d.Revoked))})
	return ds.Apply(ctx, keys)
}

// keep stores a document as the latest of its root key. fresh reports whether it is new.
func (ds *Documents) keep(ctx context.Context, root *portable.Key, raw []byte,
	d *portable.Document) (fresh bool, err error) {
	leave, err := ds.keeping.Lock(ctx, root.ID)
	if err != nil {
		return false, err
	}
	defer leave()
	have, journal := ds.document(root), ds.Store.Index().Journal
	seen := journal.TrustSequence(root.ID)
	switch {
	case d.Sequence < seen:
		return false, &portable.TrustError{Text: fmt.Sprintf("the trust document was rolled back: "+
			"it has the sequence number %d, and %d was seen", d.Sequence, seen)}
	case have != nil && d.Sequence == have.Sequence && bytes.Equal(raw, have.raw):
		return false, nil
	case have != nil && d.Sequence == have.Sequence:
		return false, &portable.TrustError{Text: fmt.Sprintf("there are two trust documents with "+
			"the sequence number %d, and the first one counts", d.Sequence)}
	}
	if err := journal.SetTrustSequence(root.ID, d.Sequence); err != nil {
		return false, err
	}
	if err := memo.Save(&ds.Store.Index().Memos, memoKey(root.ID), raw); err != nil {
		ds.Log.Warn("a trust document is not kept over a restart", "error", err)
	}
	ds.known.Store(root.ID, &taken{raw, d})
	return true, nil
}

// Why returns why a build is revoked, "" if it is not: a document of a root key among the keys
// revokes it, or a key that signed it.
func (ds *Documents) Why(keys []*portable.Key, keyIDs string, manifest portable.Digest,
	build portable.Hash) string {
	for _, root := range Roots(keys) {
		if d := ds.document(root); d != nil {
			if why := d.Why(keyIDs, manifest, build); why != "" {
				return why
			}
		}
	}
	return ""
}

// WhyNot is Why for a build in the store. It returns "" for a build that this machine compiled.
func (ds *Documents) WhyNot(keys []*portable.Key, b *index.Build) string {
	if b.Imported.Key == "" {
		return ""
	}
	return ds.Why(keys, b.Imported.Key, portable.Digest(b.Imported.Manifest),
		portable.Hash(b.BuildKey))
}

// Of returns the trust in these keys, under the documents in effect.
func (ds *Documents) Of(keys []*portable.Key) *portable.Trust {
	return &portable.Trust{Keys: keys,
		Revoked: func(keyID string, manifest portable.Digest, build portable.Hash) string {
			return ds.Why(keys, keyID, manifest, build)
		}}
}

// State returns the sequence number and the expiry of the document that is valid longest. why says
// why no build of another machine is accepted, "" if builds are or if there is no root key among
// the keys.
func (ds *Documents) State(keys []*portable.Key) (sequence uint64, expires time.Time, why string) {
	for _, root := range Roots(keys) {
		d := ds.document(root)
		switch {
		case ds.expired(root):
			if sequence == 0 {
				why = fmt.Sprintf("root key %s was trusted until %s; trust another one",
					root.Short(), root.NotAfter.Format(time.RFC3339))
			}
		case d != nil && d.Expires.After(expires):
			sequence, expires = d.Sequence, d.Expires
			why = fmt.Sprintf("the trust document of root key %s expired on %s", root.Short(),
				expires.Format(time.RFC3339))
		case sequence == 0:
			why = "there is no trust document of root key " + root.Short()
		}
	}
	if ds.Now().Before(expires) {
		why = ""
	}
	return sequence, expires, why
}

// Fresh returns an error if no build of another machine is accepted for lack of a document in
// effect. Stored builds are not affected.
func (ds *Documents) Fresh(keys []*portable.Key) error {
	if _, _, why := ds.State(keys); why != "" {
		return &portable.TrustError{Text: why, Hint: staleHint}
	}
	return nil
}

// staleHint is the hint if no trust document is in effect.
const staleHint = "get a new document: epcachectl get --on-miss fetch, from a remote " +
	"that has one, or import a newer bundle; epcachectl remote revoke signs one"

// Apply withholds the stored builds that are revoked, also those of layers.
func (ds *Documents) Apply(ctx context.Context, keys []*portable.Key) error {
	if len(ds.Known(keys)) == 0 {
		return nil
	}
	x := ds.Store.Index()
	one := func(b index.Build) error {
		why := ds.WhyNot(keys, &b)
		if why == "" || x.Journal.StateOf(b.ID).Name != index.Current {
			return ctx.Err()
		}
		return ds.Store.Withhold(b.ID, index.Withheld, why)
	}
	return errors.Join(x.Each(ctx, one), ds.Store.Layers.Each(one))
}
