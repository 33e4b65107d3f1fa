package store

import (
	"context"
	"crypto/rand"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/views"
)

// Publication is a build before it is stored.
type Publication struct {
	Build  *index.Build
	Folder string                // that its files are in
	Hashed map[string]cas.Hashed // of these, as far as that is done
	UID    uint32                // of the user who asked for it
	Room   *Reservation

	Kind, Text string        // of its event
	Counter    string        // that counts it besides; "": none
	Replaces   index.BuildID // whose pin it inherits, besides those of the same key; zero: none
}

// Publish stores a build, which is acknowledged as soon as its manifest is durable, and removes
// the builds that it supersedes. hold keeps the blobs that the build needs until then; the caller
// releases it.
func (st *Store) Publish(ctx context.Context, m Publication, hold *cas.Hold) error {
	b := m.Build
	m.Room.publishing()
	if err := st.Put(ctx, b, m.Folder, m.Hashed, hold); err != nil {
		return err
	}
	st.forms.Release(hold) // what others keep packed, and was stored whole, counts as that before the place is given back
	m.Room.Release()       // the build has taken its place, and nothing counts twice
	st.log.Info(m.Kind, "model", b.ModelName, "build", b.BuildKey.String(), "seconds", b.CompileSeconds,
		"uid", b.UID, "scope", b.Scope)
	if m.Counter != "" {
		st.index.Counters.Add(m.Counter, 1)
	}
	st.options.Published(b, m.UID) // before the event, or a subscriber who asked for the build would not hear of it
	st.Happened(eventOf(b, m.Kind, "%s", m.Text))
	st.inheritPin(m.Replaces, b)
	st.supersede(ctx, b)
	return nil
}

// Put makes blobs of the build's files, and publishes it. hold keeps what the build needs until a
// manifest says that it does; it is the caller's to release.
func (st *Store) Put(ctx context.Context, b *index.Build, out string, hashed map[string]cas.Hashed, hold *cas.Hold) error {
	for i := range b.Files {
		f := &b.Files[i]
		var err error
		path := filepath.Join(out, filepath.FromSlash(f.Name))
		if f.Digest, f.Size, err = hold.AdoptHashed(ctx, path, hashed[f.Name]); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	_, _ = rand.Read(b.ID[:]) // it never fails
	st.inHand.stored(b.ID)
	if err := st.index.Publish(ctx, *b); err != nil {
		return err
	}
	st.packer.Added(b)
	return nil
}

// supersede retracts the earlier builds of the same key: a newer one answers in their place. One that was made with
// another driver stays, for when that comes back, unless it is not served anyway.
func (st *Store) supersede(ctx context.Context, b *index.Build) {
	builds, err := st.index.Lookup(b.RequestKey, b.Scope)
	if err != nil {
		st.log.Warn("superseded builds not found", "error", err)
		return
	}
	for i := range builds {
		old := &builds[i]
		if served := st.index.Journal.StateOf(old.ID).Name == index.Current; old.BuildKey == b.BuildKey && old.ID != b.ID && (!served || SameDrivers(old.EPs, b.EPs)) {
			if st.index.Journal.StateOf(old.ID).Name == index.Damaged {
				st.Happened(eventOf(b, eventHealed, "in place of the build of %s", old.Created.Format(time.RFC3339)))
			}
			st.inheritPin(old.ID, b)
			if err := st.Remove(ctx, old, "compiled anew", views.PathGrace); err != nil {
				st.log.Warn("superseded build not removed", "build", old.ID.String(), "error", err)
			}
		}
	}
}

// SameDrivers reports whether two builds were made with the same versions of drivers.
func SameDrivers(a, b []index.EPFacts) bool {
	return slices.EqualFunc(a, b, func(a, b index.EPFacts) bool { return a.DriverVersion == b.DriverVersion })
}

// inheritPin moves the pin of a build to the one that was made in its place.
func (st *Store) inheritPin(from index.BuildID, to *index.Build) {
	pin, pinned := st.index.Journal.Pinned(from)
	if !pinned || from == to.ID {
		return
	}
	err := st.index.Journal.Pin(to.ID, pin)
	if err == nil {
		err = st.index.Journal.Unpin(from)
	}
	if err != nil {
		st.log.Error("pin not moved to the build made anew", "from", from.String(), "to", to.ID.String(), "error", err)
	}
}
