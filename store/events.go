package store

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/index"
)

// RecordEvent writes an event into the journal and passes it to the subscribers. It sets the time
// and the sequence number. It may write to the disk, so hits must not call it. An event that cannot
// be written is still passed on.
func (st *Store) RecordEvent(e index.Event) {
	e.At = st.now()
	if err := st.index.Journal.AddEvent(context.Background(), e); err != nil {
		st.log.Warn("cannot record an event", "kind", e.Kind, "error", err) // best effort
	}
}

// eventOf returns an event about a build.
func eventOf(b *index.Build, kind, format string, args ...any) index.Event {
	return index.Event{Kind: kind, RequestKey: b.RequestKey, BuildKey: b.BuildKey,
		ModelName: b.ModelName,
		Text:      fmt.Sprintf(format, args...), BuildID: b.ID, Scope: b.Scope, By: ownScope(b.UID)}
}

// ownScope is the scope of builds that only this user gets.
func ownScope(uid uint32) string { return fmt.Sprintf("uid:%d", uid) }
