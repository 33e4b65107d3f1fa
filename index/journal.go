package index

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/journalfile"
	"github.com/epcached/epcached/index/manifestpb"
	"github.com/epcached/epcached/index/reserve"
)

const (
	maxText        = 4 << 10       // of a reason or an event
	maxName        = 512           // of a model or a runtime, in an event
	maxJournal     = reserve.Bytes // then it is rewritten without obsolete records
	maxJournalRead = 256 << 20
	maxEvents      = 8 << 10 // kept when it is rewritten
)

// Journal has the facts about builds that are not in their manifests: states, pins, tombstones and
// events. It is a file of which memory has the whole content, so that reads need no I/O.
//
// Readers never block on writers, and appends never block on fsync. Locks are taken in the order
// syncing, appending, mu.
type Journal struct {
	fs   cas.FS
	dir  string // the state directory
	path string

	reserve *reserve.Reserve    // space for records that must be written on a full disk
	now     func() time.Time    // set by the index, like the next two
	wake    func()              // asks for a flush some seconds from now
	exists  func(BuildID) error // returns nil if the index has the build

	syncing sync.Mutex // one sync at a time

	appending sync.Mutex // guards the next fields, and the order of appends
	file      *os.File   // nil: it must be rewritten before the next append
	size      int64
	limit     int64  // size from which on it is rewritten
	written   uint64 // appends since the start
	synced    uint64 // number of durable appends

	mu         sync.Mutex        // guards the fields below
	states     map[BuildID]State // never Current
	pins       map[BuildID]Pin
	tombstones []Tombstone       // in the order of removal
	sequences  map[string]uint64 // of trust documents, by the id of the root key
	events     []Event           // oldest first
	last       uint64            // sequence of the latest event
	subscriber func(Event)       // nil, or receives each new event, in order
}

// openJournal reads the journal or makes one. damage is an error if it was damaged; the readable
// records are used then.
func openJournal(fsys cas.FS, dir string, reserve *reserve.Reserve) (j *Journal, damage error,
	err error) {
	j = &Journal{fs: fsys, dir: dir, path: filepath.Join(dir, "journal"), reserve: reserve,
		states: make(map[BuildID]State), pins: make(map[BuildID]Pin),
		sequences: make(map[string]uint64)}
	file, err := readFile(fsys, j.path, maxJournalRead)
	if errors.Is(err, fs.ErrNotExist) {
		return j, nil, j.rewrite()
	}
	if err != nil && !errors.As(err, new(*DamageError)) {
		return nil, nil, err
	}
	damage = err
	torn := false
	if damage == nil {
		torn, damage = journalfile.Parse(file, j.apply)
	}
	if newer := (*NewerError)(nil); errors.As(damage, &newer) {
		return nil, nil, newer // because its states say which builds must not be served
	}
	switch {
	case damage != nil:
		if err := j.keepDamaged(damage.Error()); err != nil {
			return nil, nil, err
		}
		err = j.rewrite()
	case torn:
		err = j.rewrite() // a crash truncated the last append, which was not acknowledged
	default:
		j.size, j.limit = int64(len(file)), maxJournal
		j.file, err = fsys.OpenWrite(j.path)
	}
	return j, damage, err
}

// keepDamaged links the file into quarantine, and leaves it in place, because it is the best
// journal until the new one replaces it.
func (j *Journal) keepDamaged(why string) error {
	aside := j.path + ".damaged"
	if err := remove(j.fs, aside); err != nil {
		return err
	}
	if err := j.fs.Link(j.path, aside); err != nil {
		return err
	}
	return cas.SetAside(j.fs, j.dir, aside, why)
}

// apply applies a record to memory.
func (j *Journal) apply(rec *manifestpb.Record) error {
	switch kind := rec.Kind.(type) {
	case *manifestpb.Record_State:
		var id BuildID
		if err := fixed("build_id", id[:], kind.State.GetBuildId()); err != nil {
			return err
		}
		j.setState(id, State{kind.State.Name, kind.State.Reason, fromNanos(kind.State.At)})
	case *manifestpb.Record_Event:
		e, err := eventOf(kind.Event)
		if err != nil {
			return err
		}
		j.addEvent(e)
	case *manifestpb.Record_Pin:
		var id BuildID
		if err := fixed("build_id", id[:], kind.Pin.GetBuildId()); err != nil {
			return err
		}
		j.pins[id] = Pin{At: fromNanos(kind.Pin.At), UID: kind.Pin.Uid}
		if kind.Pin.Off {
			delete(j.pins, id)
		}
	case *manifestpb.Record_Tombstone:
		t, err := tombstoneOf(kind.Tombstone)
		if err != nil {
			return err
		}
		j.addTombstone(t)
	case *manifestpb.Record_TrustSequence:
		j.sequences[kind.TrustSequence.Key] = kind.TrustSequence.Sequence
	}
	return nil // a kind of a newer epcached that may be ignored
}

func eventOf(m *manifestpb.Event) (Event, error) {
	e := Event{At: fromNanos(m.At), Kind: m.Kind, Text: m.Text, ModelName: m.ModelName,
		Runtime: m.Runtime, Scope: m.Scope, By: m.By}
	return e, cmp.Or(optional("request_key", e.RequestKey[:], m.RequestKey),
		optional("build_id", e.BuildID[:], m.BuildId),
		optional("build_key", e.BuildKey[:], m.BuildKey))
}

func (j *Journal) setState(id BuildID, s State) {
	if s.Name == Current {
		delete(j.states, id)
	} else {
		j.states[id] = s
	}
}

// addEvent appends an event, and bounds the memory without moving all events each time.
func (j *Journal) addEvent(e Event) {
	if len(j.events) >= 2*maxEvents {
		j.events = latestOfEachUser(j.events, maxEvents, math.MaxInt)
	}
	j.events = append(j.events, e)
}

func stateRecord(id BuildID, s State) *manifestpb.Record {
	return &manifestpb.Record{Kind: &manifestpb.Record_State{State: &manifestpb.BuildState{
		BuildId: id[:], Name: shorten(s.Name, 64), Reason: shorten(s.Reason, maxText),
		At: nanos(s.At),
	}}}
}

func eventRecord(e Event) *manifestpb.Record {
	m := &manifestpb.Event{At: nanos(e.At), Kind: e.Kind, Text: e.Text, ModelName: e.ModelName,
		Runtime: e.Runtime, Scope: e.Scope, By: e.By}
	if e.RequestKey != (RequestKey{}) {
		m.RequestKey = e.RequestKey[:]
	}
	if !e.BuildID.IsZero() {
		m.BuildId = e.BuildID[:]
	}
	if e.BuildKey != (BuildKey{}) {
		m.BuildKey = e.BuildKey[:]
	}
	return &manifestpb.Record{Kind: &manifestpb.Record_Event{Event: m}}
}

func sequenceRecord(key string, n uint64) *manifestpb.Record {
	return &manifestpb.Record{Kind: &manifestpb.Record_TrustSequence{
		TrustSequence: &manifestpb.TrustSequence{Key: key, Sequence: n}}}
}

// TrustSequence returns the highest sequence number of a root key's trust documents that was seen.
func (j *Journal) TrustSequence(key string) uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.sequences[key]
}

// SetTrustSequence records a sequence number, durably when it returns.
func (j *Journal) SetTrustSequence(key string, n uint64) error {
	return j.change(func() { j.sequences[key] = n }, sequenceRecord(key, n))
}

// change applies do to memory, and appends its records, durably when it returns; on a full disk it
// uses the reserve. After an error the change is in memory only, and the next append rewrites the
// whole journal.
func (j *Journal) change(do func(), records ...*manifestpb.Record) error {
	j.appending.Lock()
	j.mu.Lock()
	do()
	j.mu.Unlock()
	err := j.reserve.Use(func() error { return j.append(records...) })
	if err != nil && j.file != nil {
		_ = j.file.Close() // ignored, because the journal is rewritten
		j.file = nil
	}
	upTo := j.written
	j.appending.Unlock()
	if err != nil {
		return err
	}
	return j.sync(upTo)
}

// forget drops the state and the pin of a removed build. It writes no record, because build ids are
// never reused.
func (j *Journal) forget(id BuildID) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.states, id)
	delete(j.pins, id)
}

// prune drops the states and pins of removed builds, which the file may still have, and the
// tombstones of existing builds, whose removal a crash prevented. It keeps states of builds that a
// layer has or may have.
func (j *Journal) prune(there func(BuildID) bool, lower Lower) {
	j.mu.Lock()
	defer j.mu.Unlock()
	maps.DeleteFunc(j.states, func(id BuildID, _ State) bool {
		return !there(id) && (lower == nil || !lower.Keep(id))
	})
	maps.DeleteFunc(j.pins, func(id BuildID, _ Pin) bool { return !there(id) })
	j.tombstones = slices.DeleteFunc(j.tombstones, func(g Tombstone) bool {
		return there(g.BuildID)
	})
}

// StateOf returns the state of a build.
func (j *Journal) StateOf(id BuildID) State {
	j.mu.Lock()
	defer j.mu.Unlock()
	if s, ok := j.states[id]; ok {
		return s
	}
	return State{Name: Current}
}

// NotServed returns the builds in any state but Current.
func (j *Journal) NotServed() []BuildID {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Collect(maps.Keys(j.states))
}

// AddEvent adds to the history of a request, or of the machine; written within seconds. Texts are
// cut at 4 KiB, names at 512 bytes. After an error the event is known until Close.
func (j *Journal) AddEvent(ctx context.Context, e Event) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if e.At.IsZero() {
		e.At = j.now()
	}
	j.wake()
	return j.note(e)
}

// note adds an event, durable at the next flush. Memory has it even if that fails.
func (j *Journal) note(e Event) error {
	e.At, e.Text, e.Kind = trimTime(e.At), shorten(e.Text, maxText), shorten(e.Kind, 64)
	e.ModelName, e.Runtime, e.Scope = shorten(e.ModelName, maxName), shorten(e.Runtime, maxName),
		shorten(e.Scope, 64)
	e.By = shorten(e.By, 64)
	j.appending.Lock()
	defer j.appending.Unlock()
	j.mu.Lock()
	j.last++
	e.Sequence = j.last
	j.addEvent(e)
	if j.subscriber != nil {
		j.subscriber(e)
	}
	j.mu.Unlock()
	return j.append(eventRecord(e))
}

// History returns the kept events of a request, oldest first.
func (j *Journal) History(k RequestKey) []Event {
	return j.eventsThat(func(e *Event) bool { return e.RequestKey == k })
}

// Events returns the kept events since a time, of all requests and of the machine, oldest first.
// The latest 8,000 are always kept, and at most twice as many.
func (j *Journal) Events(since time.Time) []Event {
	// compares each event, because the clock may have been set back
	return j.eventsThat(func(e *Event) bool { return !e.At.Before(since) })
}

// eventsThat returns the events that match, oldest first.
func (j *Journal) eventsThat(match func(*Event) bool) []Event {
	j.mu.Lock()
	defer j.mu.Unlock()
	var events []Event
	for i := range j.events {
		if match(&j.events[i]) {
			events = append(events, j.events[i])
		}
	}
	return events
}

// append writes records, which memory has already, all or none. If the state of the file is
// unknown, it writes a new one from memory. The caller holds appending.
func (j *Journal) append(records ...*manifestpb.Record) error {
	if j.file == nil || j.size >= j.limit {
		return j.rewrite()
	}
	b, err := journalfile.AppendRecords(nil, records...)
	if err != nil {
		return err
	}
	if _, err := j.fs.WriteAt(j.file, b, j.size); err != nil {
		return err // size is unchanged: the next append overwrites the bytes
	}
	j.size += int64(len(b))
	j.written++
	return nil
}

// sync makes the first upTo appends durable. Callers that wait for the same sync share it. Readers
// and appends never block on it.
func (j *Journal) sync(upTo uint64) error {
	j.syncing.Lock()
	defer j.syncing.Unlock()
	j.appending.Lock()
	file, written := j.file, j.written
	if j.synced >= min(upTo, written) {
		j.appending.Unlock()
		return nil
	}
	if file == nil { // another caller's sync failed, and so did the rewrite
		defer j.appending.Unlock()
		return j.rewrite()
	}
	j.appending.Unlock()
	err := j.fs.Sync(file)
	j.appending.Lock()
	defer j.appending.Unlock()
	if j.file != file {
		return nil // it was rewritten in the meantime, with all records
	}
	if err != nil {
		// The bytes on the disk are unknown now, and another sync would succeed without writing
		// them.
		return j.rewrite()
	}
	j.synced = max(j.synced, written)
	return nil
}

// rewrite makes a new journal of all states, pins and tombstones, and the latest events. The rename
// is the commit point; before it the old file is valid. On a full disk it uses the reserve. The
// caller holds appending.
func (j *Journal) rewrite() error {
	if j.file != nil {
		// Closing reports nothing new, because each record was synced or lost before.
		_ = j.file.Close()
		j.file = nil
	}
	b, err := j.snapshot()
	if err != nil {
		return err
	}
	return j.reserve.Use(func() error { return j.replace(b) })
}

// replace puts a file with these bytes in the journal's place.
func (j *Journal) replace(b []byte) error {
	temp := j.path + ".new"
	if err := remove(j.fs, temp); err != nil {
		return err
	}
	if err := cas.WriteFile(j.fs, temp, b); err != nil {
		return err
	}
	if err := j.fs.Rename(temp, j.path); err != nil {
		return err
	}
	if err := j.fs.SyncDir(j.dir); err != nil {
		return err
	}
	f, err := j.fs.OpenWrite(j.path)
	if err != nil {
		return err
	}
	j.file, j.size, j.synced = f, int64(len(b)), j.written
	j.limit = max(maxJournal, 2*j.size)
	return nil
}

// snapshot encodes a journal from memory: every state, pin and tombstone, and the latest events up
// to half the limit. It drops old records, and copies the rest before encoding, so that readers do
// not block.
func (j *Journal) snapshot() ([]byte, error) {
	j.mu.Lock()
	j.tombstones = slices.Clone(j.tombstones[max(0, len(j.tombstones)-maxTombstones):])
	j.events = latestOfEachUser(j.events, maxEvents, maxJournal/2)
	states, pins := maps.Clone(j.states), maps.Clone(j.pins)
	sequences := maps.Clone(j.sequences)
	tombstones, events := slices.Clone(j.tombstones), slices.Clone(j.events)
	j.mu.Unlock()
	var records []*manifestpb.Record
	for id, s := range states {
		records = append(records, stateRecord(id, s))
	}
	for id, p := range pins {
		records = append(records, pinRecord(id, p, false))
	}
	for key, n := range sequences {
		records = append(records, sequenceRecord(key, n))
	}
	for i := range tombstones {
		records = append(records, tombstoneRecord(&tombstones[i]))
	}
	for _, e := range events {
		records = append(records, eventRecord(e))
	}
	return journalfile.AppendRecords(journalfile.AppendHeader(nil), records...)
}

func (j *Journal) close() error {
	err := j.sync(math.MaxUint64)
	j.appending.Lock()
	defer j.appending.Unlock()
	if j.file != nil {
		err = errors.Join(err, j.file.Close())
		j.file = nil
	}
	return err
}

// trimTime removes the monotonic reading and the time zone, which files do not have.
func trimTime(t time.Time) time.Time { return fromNanos(nanos(t)) }

// RewriteIfDeleted writes the journal again from memory if a user has deleted it, because otherwise
// the states of withheld builds would be lost at the end of the process. With read it also reads
// the file, and rewrites it if it is damaged. It reports whether it did. Call it only while the
// state directory is still this index's.
func (j *Journal) RewriteIfDeleted(read bool) (restored bool, err error) {
	j.appending.Lock()
	defer j.appending.Unlock()
	if _, err := os.Lstat(j.path); err == nil && !read {
		return false, nil
	}
	found, err := j.checkLocked()
	if err == nil && len(found) > 0 {
		if err = j.keepDamaged(found[0].Detail); err == nil || errors.Is(err, fs.ErrNotExist) {
			restored, err = true, j.rewrite()
		}
	}
	if err != nil {
		err = fmt.Errorf("restore journal: %w", err)
	}
	return restored, err
}
