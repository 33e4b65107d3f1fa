// Package event has the kinds of events in a store's history, and makes events.
package event

import (
	"fmt"

	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// The kinds of events. A hit is no event: hits are only counted.
const (
	Compiled = "compiled" // a build was made and stored
	// a build was converted from embedded to sidecar, or back
	Converted = "converted"
	// a compiled model was served to its waiters but not stored
	Unkept       = "not kept"
	Failed       = "failed"        // a compile failed
	Cancelled    = "cancelled"     // a compile was cancelled by its waiters
	Claimed      = "claimed"       // an application compiles a model itself
	ClaimEnded   = "claim ended"   // a claim ended without a result
	Imported     = "imported"      // a build of another machine was stored
	Fetched      = "fetched"       // a build was fetched from a remote and stored
	Published    = "published"     // a build was copied to a remote
	NotPublished = "not published" // a build could not be copied to a remote
	Remote       = "remote"        // a remote did not answer, or sent wrong bytes
	Trust        = "trust"         // a trust document was accepted or refused
	Put          = "put"           // a model that an application compiled was stored as a build
	// a build was removed, evicted or superseded; the index writes this event itself
	Retracted  = "retracted"
	Withheld   = "withheld"    // a build is no longer served, until it is judged good again
	Damaged    = "damaged"     // bytes of a build have changed
	Healed     = "healed"      // a build replaced one that was damaged
	Judged     = "judged"      // the verdict on a build for a runtime changed
	Rebuild    = "rebuild"     // a rebuild was queued
	Rebuilt    = "rebuilt"     // a build was compiled again
	NotRebuilt = "not rebuilt" // a rebuild failed, or had no source
	// a client reported that a build does not load; the text has the decision
	Report        = "report"
	Probed        = "probed"        // a runtime was probed and can be used
	Unusable      = "unusable"      // a runtime cannot be used
	Changing      = "changing"      // a runtime's files are being written
	Changed       = "changed"       // a runtime's libraries, or a driver, were replaced
	Configuration = "configuration" // the configuration or the rules were changed, or refused
	Missed        = "missed"        // a subscriber fell behind; sent to that subscriber alone
)

// Of returns an event about a build.
func Of(b *index.Build, kind, format string, args ...any) index.Event {
	return index.Event{Kind: kind, RequestKey: b.RequestKey, BuildKey: b.BuildKey,
		ModelName: b.ModelName, Text: fmt.Sprintf(format, args...), BuildID: b.ID, Scope: b.Scope,
		By: rights.OwnScope(rights.Peer{UID: b.UID})}
}

// UnkeptKey returns the key of the memo that has the hint for an Unkept event, whose text has none.
func UnkeptKey(e *index.Event) string { return "unkept:" + e.Scope + ":" + e.RequestKey.String() }

// About is the request of an event without a build.
type About struct {
	Peer  rights.Peer
	Key   index.RequestKey
	Model string // its name
}

// For returns an event about a request that has no build. Only the peer and administrators see it.
func For(a About, kind, format string, args ...any) index.Event {
	return index.Event{Kind: kind, RequestKey: a.Key, ModelName: a.Model,
		Text: fmt.Sprintf(format, args...), Scope: rights.OwnScope(a.Peer)}
}

// Reply fills the message that clients receive.
func Reply(e *index.Event) *wire.Event {
	return &wire.Event{AtMs: wire.Milliseconds(e.At), Kind: e.Kind,
		RequestKey: wire.KeyText(e.RequestKey), Build: wire.KeyText(e.BuildKey),
		Model: wire.Clip(e.ModelName), Text: wire.Valid(e.Text), Runtime: wire.Valid(e.Runtime),
		Sequence: e.Sequence}
}
