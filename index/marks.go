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
	UID uint32 // the user that pinned it
}

// A Mark is a change of a build's state or pin, for Journal.Mark.
type Mark struct {
	ID    BuildID
	State *State // the new state; nil: the pin changes
	Pin   *Pin   // the new pin; nil: unpinned

	Err error // why it was not recorded

	before *Pin
}

func (m *Mark) fail(err error) {
	switch {
	case m.State != nil:
		m.Err = fmt.Errorf("note that build %s is %s: %w", m.ID, m.State.Name, err)
	case m.Pin != nil:
		m.Err = fmt.Errorf("pin build %s: %w", m.ID, err)
	default:
		m.Err = fmt.Errorf("unpin build %s: %w", m.ID, err)
	}
}

// Mark records marks, durably when it returns; they share one sync. Pinning a build again changes
// only the user and the time, and it is no error if one that is unpinned was not pinned. If marks
// cannot be written, pins are unchanged, because the caller gets an error. States are changed in
// memory even then, because a build that may be damaged must not be served.
func (j *Journal) Mark(list []*Mark) {
	var todo []*Mark
	var records []*manifestpb.Record
	for _, m := range list {
		if record := j.recordOf(m); record != nil {
			todo, records = append(todo, m), append(records, record)
		}
	}
	if len(todo) == 0 {
		return
	}
	err := j.change(func() {
		for _, m := range todo {
			if m.State != nil {
				j.setState(m.ID, *m.State)
			} else {
				m.before = j.setPin(m.ID, m.Pin)
			}
		}
	}, records...)
	if err == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, m := range slices.Backward(todo) {
		if m.fail(err); m.State == nil {
			j.setPin(m.ID, m.before)
		}
	}
}

// recordOf completes a mark, and returns its record, nil if it changes nothing.
func (j *Journal) recordOf(m *Mark) *manifestpb.Record {
	if was, pinned := j.Pinned(m.ID); m.State == nil && m.Pin == nil {
		if !pinned {
			return nil
		}
		return pinRecord(m.ID, was, true)
	}
	if err := j.exists(m.ID); err != nil {
		m.fail(err)
		return nil
	}
	if m.State == nil {
		m.Pin = &Pin{At: trimTime(m.Pin.At), UID: m.Pin.UID}
		return pinRecord(m.ID, *m.Pin, false)
	}
	m.State = &State{m.State.Name, m.State.Reason, trimTime(m.State.At)}
	return stateRecord(m.ID, *m.State)
}

// setPin pins or unpins a build, and returns its previous pin. The caller holds mu.
func (j *Journal) setPin(id BuildID, p *Pin) (before *Pin) {
	if was, ok := j.pins[id]; ok {
		before = &was
	}
	if p == nil {
		delete(j.pins, id)
	} else {
		j.pins[id] = *p
	}
	return before
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

func pinRecord(id BuildID, p Pin, off bool) *manifestpb.Record {
	return &manifestpb.Record{Kind: &manifestpb.Record_Pin{Pin: &manifestpb.Pin{BuildId: id[:],
		Off: off, At: nanos(p.At), Uid: p.UID}}}
}
