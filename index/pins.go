package index

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/epcached/epcached/index/manifestpb"
)

// Pin protects a build from eviction.
type Pin struct {
	At  time.Time
	UID uint32 // the user who pinned it
}

// Pin protects a build from eviction, durably when it returns. Pinning it again changes only the
// user and the time.
func (j *Journal) Pin(id BuildID, p Pin) error {
	if err := j.exists(id); err != nil {
		return fmt.Errorf("pin build %s: %w", id, err)
	}
	if p.At.IsZero() {
		p.At = j.now()
	}
	p.At = trimTime(p.At)
	if err := j.pin(id, p, false); err != nil {
		return fmt.Errorf("pin build %s: %w", id, err)
	}
	return nil
}

// Unpin takes that back, durably when it returns. It is no error if the build was not pinned.
func (j *Journal) Unpin(id BuildID) error {
	p, ok := j.Pinned(id)
	if !ok {
		return nil
	}
	if err := j.pin(id, p, true); err != nil {
		return fmt.Errorf("unpin build %s: %w", id, err)
	}
	return nil
}

// Pinned returns the build's pin.
func (j *Journal) Pinned(id BuildID) (Pin, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	p, ok := j.pins[id]
	return p, ok
}

// PinnedBuilds returns the builds that are pinned.
func (j *Journal) PinnedBuilds() []BuildID {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Collect(maps.Keys(j.pins))
}

// pin writes a pin, or takes it back, durably when it returns. After an error nothing has changed,
// because the caller is told so.
func (j *Journal) pin(id BuildID, p Pin, off bool) error {
	set := func(p Pin, pinned bool) {
		if pinned {
			j.pins[id] = p
		} else {
			delete(j.pins, id)
		}
	}
	var before Pin
	var was bool
	err := j.change(func() {
		before, was = j.pins[id]
		set(p, !off)
	}, pinRecord(id, p, off))
	if err != nil {
		j.mu.Lock()
		defer j.mu.Unlock()
		set(before, was)
	}
	return err
}

func (j *Journal) applyPin(m *manifestpb.Pin) error {
	var id BuildID
	if err := fixed("build_id", id[:], m.GetBuildId()); err != nil {
		return err
	}
	if m.Off {
		delete(j.pins, id)
		return nil
	}
	j.pins[id] = Pin{At: fromNanos(m.At), UID: m.Uid}
	return nil
}

func pinRecord(id BuildID, p Pin, off bool) *manifestpb.Record {
	return &manifestpb.Record{Kind: &manifestpb.Record_Pin{Pin: &manifestpb.Pin{BuildId: id[:], Off: off, At: nanos(p.At), Uid: p.UID}}}
}
