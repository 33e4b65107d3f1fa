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

// Publication is a build to be stored.
type Publication struct {
	Build       *index.Build
	Dir         string                // directory with its files
	Hashed      map[string]cas.Hashed // digests of files that are hashed already
	UID         uint32                // the user that requested it
	Reservation *Reservation

	Kind, Text string // of the event
	Counter    string // that counts it besides; "": none
	// Replaces is a build whose pin moves to this one, like those of the same key; may be zero.
	Replaces index.BuildID
}

// Publish stores the build's files as blobs and then the build, which is durable when its manifest
// is. Then it removes superseded builds. hold protects the blobs from removal until the manifest
// refers to them; the caller releases it.
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
	_, _ = rand.Read(b.ID[:]) // never fails
	st.buildGuard.noteStored(b.ID)
	st.committer.expected.Add(1)
	staged, err := st.index.Stage(ctx, *b)
	st.committer.expected.Add(-1)
	if err != nil {
		return err
	}
	one := &change{Change: staged, may: func() bool { m.Reservation.releaseQuota(); return true },
		then: func() { st.notePublished(&m) }}
	// Without the caller's context, because hold must last until the commit.
	if err := st.committer.commit(context.Background(),
		&commitRequest{builds: []*change{one}}); err != nil {
		return err
	}
	if one.Err != nil {
		return one.Err
	}
	// Account for blobs that were packed for other builds and are now also whole before the
	// reservation ends, so that bytes may count twice for a moment, but are never missing.
	st.packing.Release(hold)
	m.Reservation.Release()
	st.packer.EnqueueBuild(b)
	st.supersede(b, m.Replaces)
	return nil
}

// notePublished notifies the parts that need to know of a stored build.
func (st *Store) notePublished(m *Publication) {
	b := m.Build
	st.log.Info(m.Kind, "model", b.ModelName, "build", b.BuildKey.String(), "seconds",
		b.CompileSeconds, "uid", b.UID, "scope", b.Scope)
	if m.Counter != "" {
		st.index.Counters.Add(m.Counter, 1)
	}
	// before the event, because otherwise the requesting subscriber could not see the event
	st.options.OnPublished(b, m.UID)
	st.RecordEvent(eventOf(b, m.Kind, "%s", m.Text))
}

// supersede removes the earlier builds of the same key, which the new build replaces. It keeps one
// that was made with another driver, in case that returns, unless the build is withheld. Their
// pins, and that of replaces, move to the new build.
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
