package store

import (
	"context"
	"crypto/rand"
	"errors"
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
	Build       *index.Build
	Dir         string                // that its files are in
	Hashed      map[string]cas.Hashed // of these, as far as that is done
	UID         uint32                // of the user that asked for it
	Reservation *Reservation

	Kind, Text string // of its event
	Counter    string // that counts it besides; "": none
	// the build that it inherits a pin from, besides those of the same key; zero: none
	Replaces index.BuildID
}

// Publish makes blobs of the build's files and stores the build, which is acknowledged as soon as
// its manifest is durable. Then it removes the builds that it supersedes. hold keeps the blobs that
// the build needs until a manifest says that it does; the caller releases it.
func (st *Store) Publish(ctx context.Context, m Publication, hold *cas.Hold) error {
	b := m.Build
	for i := range b.Files {
		f := &b.Files[i]
		var err error
		path := filepath.Join(m.Dir, filepath.FromSlash(f.Name))
		if f.Digest, f.Size, err = hold.AdoptHashed(ctx, path, m.Hashed[f.Name]); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	_, _ = rand.Read(b.ID[:]) // it never fails
	st.buildGuard.noteStored(b.ID)
	st.committer.expected.Add(1)
	staged, err := st.index.Stage(ctx, *b)
	st.committer.expected.Add(-1)
	if err != nil {
		return err
	}
	one := &change{Change: staged, may: func() bool { m.Reservation.releaseQuota(); return true },
		then: func() { st.notePublished(&m) }}
	// It waits whatever the context says, because hold ends with the caller.
	if err := st.committer.commit(context.Background(),
		&commitRequest{builds: []*change{one}}); err != nil {
		return err
	}
	if one.Err != nil {
		return one.Err
	}
	// A blob that other builds keep packed, and that was stored whole, is accounted as whole before
	// the reservation ends: for a moment bytes may count twice, but never not at all.
	st.forms.Release(hold)
	m.Reservation.Release()
	st.packer.EnqueueBuild(b)
	st.supersede(b, m.Replaces)
	return nil
}

// notePublished says of a build that it is stored.
func (st *Store) notePublished(m *Publication) {
	b := m.Build
	st.log.Info(m.Kind, "model", b.ModelName, "build", b.BuildKey.String(), "seconds",
		b.CompileSeconds, "uid", b.UID, "scope", b.Scope)
	if m.Counter != "" {
		st.index.Counters.Add(m.Counter, 1)
	}
	// before the event: else a subscriber that asked for the build would miss it
	st.options.OnPublished(b, m.UID)
	st.RecordEvent(eventOf(b, m.Kind, "%s", m.Text))
}

// supersede retracts the earlier builds of the same key: a newer one answers in their place. One
// that was made with another driver stays, for when that comes back, unless it is not served
// anyway. Their pins, and that of replaces, move to the new build.
func (st *Store) supersede(b *index.Build, replaces index.BuildID) {
	builds, err := st.index.Lookup(b.RequestKey, b.Scope)
	if err != nil {
		st.log.Warn("cannot find replaced builds", "error", err)
	}
	pinned := []index.BuildID{replaces}
	var gone []Removal
	for i := range builds {
		old, state := &builds[i], st.index.Journal.StateOf(builds[i].ID).Name
		if old.Layer != "" || old.BuildKey != b.BuildKey || old.ID == b.ID ||
			state == index.Current && !SameDrivers(old.EPs, b.EPs) {
			continue
		}
		if state == index.Damaged {
			st.RecordEvent(eventOf(b, "healed", "replaces the build of "+
				"%s", old.Created.Format(time.RFC3339)))
		}
		pinned, gone = append(pinned, old.ID),
			append(gone, Removal{Build: old, Why: "recompiled", grace: views.PathGrace})
	}
	for _, from := range pinned {
		if pin, is := st.index.Journal.Pinned(from); is && from != b.ID {
			if err := movePin(context.Background(), st, b.ID, &pin, from); err != nil {
				st.log.Error("cannot move a pin to the recompiled "+
					"build", "from", from.String(), "to", b.ID.String(), "error", err)
			}
		}
	}
	if len(gone) == 0 {
		return
	}
	err = st.RemoveAll(gone)
	for i := range gone {
		err = errors.Join(err, gone[i].Err)
	}
	if err != nil {
		st.log.Warn("cannot remove replaced builds", "build", b.ID.String(), "error", err)
	}
}

// SameDrivers reports whether two builds were made with the same versions of drivers.
func SameDrivers(a, b []index.EPFacts) bool {
	return slices.EqualFunc(a, b, func(a, b index.EPFacts) bool {
		return a.DriverVersion == b.DriverVersion
	})
}
