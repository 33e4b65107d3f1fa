package cache

import (
	"github.com/epcached/epcached/index"
)

// Event is something that happened to an entry, or to the machine.
type Event = index.Event

// happened is the one place through which everything goes that happens: into the journal, and to the subscribers. The
// time and the sequence are filled in. It may write to the disk, so it is not for the path of a hit, and it may not be
// called from within a lock that a subscriber could want. An event that cannot be written is still told.
//
// Of a build: c.happened(event.Of(b, event.Judged, "...")). Of a runtime, or of the machine, which every peer hears of:
// c.happened(Event{Kind: event.Probed, Runtime: rt.name, Text: "..."}). Of a request without a build, heard by the one
// who asked: c.happened(event.For(event.About{...}, event.Failed, "...")).
func (c *Cache) happened(e Event) { c.store.Happened(e) }
