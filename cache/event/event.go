// Package event names the kinds of events that the history of a store consists of, and makes them.
package event

import (
	"fmt"

	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// The kinds of events. A hit is none: hits are counted.
const (
	Compiled = "compiled" // a build was made and stored
	// a build was made from its other form: with the context inside the graph, or beside it
	Converted = "converted"
	// a compiled model was given to its waiters, and could not be kept
	Unkept       = "not kept"
	Failed       = "failed"        // a compile brought no result
	Cancelled    = "cancelled"     // a compile was cancelled by its waiters
	Claimed      = "claimed"       // an application compiles a model itself
	ClaimEnded   = "claim ended"   // without a result
	Imported     = "imported"      // a build of another machine was stored
	Fetched      = "fetched"       // a build was stored that a remote had
	Published    = "published"     // a build was copied to a remote
	NotPublished = "not published" // it could not be
	Trust        = "trust"         // a trust document was taken, or refused
	Put          = "put"           // a model that an application compiled was stored as a build
	// a build was removed, evicted or superseded; written by the index itself
	Retracted  = "retracted"
	Withheld   = "withheld"    // a build is not served any more, until it is judged otherwise
	Damaged    = "damaged"     // bytes of a build have changed
	Healed     = "healed"      // a build replaced one that was damaged
	Judged     = "judged"      // the verdict on a build for a runtime changed
	Rebuild    = "rebuild"     // a build is to be compiled again, and queued
	Rebuilt    = "rebuilt"     // it was compiled again
	NotRebuilt = "not rebuilt" // it was not: no source at hand, or the compile failed
	// a client reported that a build does not load, and what followed
	Report        = "report"
	Probed        = "probed"        // a runtime was probed and can be used
	Unusable      = "unusable"      // a runtime cannot be used
	Changing      = "changing"      // a runtime's files are being written
	Changed       = "changed"       // a runtime's libraries, or a driver, were replaced
	Configuration = "configuration" // the configuration or the rules were changed, or refused
	Missed        = "missed"        // a subscriber fell behind; sent to that subscriber alone
)

// Of returns an event of a build.
func Of(b *index.Build, kind, format string, args ...any) index.Event {
	return index.Event{Kind: kind, RequestKey: b.RequestKey, BuildKey: b.BuildKey,
		ModelName: b.ModelName, Text: fmt.Sprintf(format, args...), BuildID: b.ID, Scope: b.Scope,
		By: rights.OwnScope(rights.Peer{UID: b.UID})}
}

// UnkeptKey is the memo with the hint of an event that a result was not kept: its text has none.
func UnkeptKey(e *index.Event) string { return "unkept:" + e.Scope + ":" + e.RequestKey.String() }

// About is the request that an event without a build is about.
type About struct {
	Peer  rights.Peer
	Key   index.RequestKey
	Model string // its name
}

// For returns an event of a request that has no build. Only the peer and administrators see it.
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
