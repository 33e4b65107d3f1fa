package store

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// The packer reads blobs one at a time, while no request and no compile runs, to find the bytes
// that they share. The index is the queue, so that a restart continues: a blob without a recorded
// result has not been read. The packer walks the index at the start and after a change of the
// settings, and otherwise reads only new and changed blobs, so that a new build costs the same in a
// large store.

// When builds are packed.
const (
	PackCold   = "cold"   // builds that were not used for a while
	PackAlways = "always" // all builds, as soon as they are not in use
	PackOff    = "off"    // only on request; the packer reads no blobs
)

const (
	DefaultPackAfter = 2 * time.Hour
	packEvery        = 10 * time.Minute      // interval of looking for cold builds
	gateWait         = 20 * time.Millisecond // interval of checks for requests under way
	maxPause         = 20 * time.Millisecond // between two reads
)

// Packing says when builds are packed, with all defaults filled in.
type Packing struct {
	When  string
	After time.Duration // time without use
}

// Packer finds the bytes that blobs share in the background, packs cold builds and drops unused
// copies.
type Packer struct {
	st             *Store
	retryAll       chan struct{} // wakes the packer
	activeRequests atomic.Int64  // requests under way
	sweepAll       atomic.Int64  // collections that wait for blobs which the packer reads
	// toRead is the number of unread blobs at the last count.
	toRead atomic.Int64

	sweeping sync.Mutex              // held during Sweep
	renewed  bool                    // sketches of other versions are removed; guarded by sweeping
	futile   map[packing.Family]bool // families that could not be compacted; guarded by sweeping

	mu sync.Mutex
	// blobs of new builds, and unpacked ones, in order of arrival; guarded by mu
	fresh  []cas.Digest
	failed []cas.Digest // blobs that could not be read; guarded by mu
	all    bool         // the index may have more unread blobs; guarded by mu
	due    bool         // builds may have become cold; guarded by mu

	slowly *rate.Limiter // rate of the scrub

	pace sync.Mutex // lets one read begin at a time
	last time.Time  // when the gate last opened; guarded by pace
}

// RequestSweep wakes the packer to read all unread blobs and pack cold builds.
func (s *Packer) RequestSweep() {
	s.mu.Lock()
	s.all, s.due = true, true
	s.mu.Unlock()
	s.signal()
}

// RetrySweep makes the next sweep pack builds that have become cold, and retry failed blobs.
func (s *Packer) RetrySweep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.due = true
	for _, d := range s.failed {
		s.enqueue(d)
	}
	s.failed = nil
}

// enqueue queues a blob for the next sweep. The caller holds mu.
func (s *Packer) enqueue(d cas.Digest) {
	if len(s.fresh) >= maxFresh {
		s.fresh, s.all = nil, true
	}
	if !s.all {
		s.fresh = append(s.fresh, d)
	}
}

// EnqueueChanged queues a blob that was unpacked or has lost its base.
func (s *Packer) EnqueueChanged(d cas.Digest) {
	s.mu.Lock()
	s.enqueue(d)
	s.mu.Unlock()
}

// maxFresh bounds the queue of single blobs.
const maxFresh = 1 << 12

// EnqueueBuild queues the blobs of a new build.
func (s *Packer) EnqueueBuild(b *index.Build) {
	s.mu.Lock()
	for d, size := range b.DistinctBlobs() {
		if size >= packing.MinBlobSize {
			s.enqueue(d)
		}
	}
	s.mu.Unlock()
	s.signal()
}

func (s *Packer) signal() {
	select {
	case s.retryAll <- struct{}{}:
	default: // woken already
	}
}

// Remaining returns the number of unread blobs.
func (s *Packer) Remaining() int64 { return s.toRead.Load() }

// Pending reports whether the next sweep walks the index, and which blobs could not be read.
func (s *Packer) Pending() (all bool, failed []cas.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all, slices.Clone(s.failed)
}

// BeginRequest is called at the beginning of each request, and done at its end.
func (s *Packer) BeginRequest() (done func()) {
	s.activeRequests.Add(1)
	return func() { s.activeRequests.Add(-1) }
}

// AwaitIdle blocks while a request or a compile is under way, and then lets background work run for
// half of the time, because other programs need the processor as well. It returns at once while a
// caller waits for the representation lock, or a collection waits for a blob that is being read,
// because the blocked work may hold these, and requests may wait for the collector.
func (s *Packer) AwaitIdle(ctx context.Context) error {
	s.pace.Lock()
	defer s.pace.Unlock()
	pause := min(time.Since(s.last), maxPause)
	for {
		if s.st.packing.LockContended() || s.sweepAll.Load() > 0 {
			s.last = time.Now()
			return ctx.Err()
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
		if s.activeRequests.Load() == 0 && !s.st.options.Compiling() {
			s.last = time.Now()
			return nil
		}
		pause = gateWait
	}
}

// ErrCollected says that reading a blob was stopped because a collection waits to remove it.
var ErrCollected = fmt.Errorf("%w: it is being evicted", packing.ErrInUse)

// AwaitIdleRead is the gate of work that only reads, and can be stopped between two pieces. It
// fails with ErrCollected when a collection waits for the blobs, which are then read another time.
func (s *Packer) AwaitIdleRead(ctx context.Context) error {
	if err := s.AwaitIdle(ctx); err != nil {
		return err
	}
	if s.sweepAll.Load() > 0 {
		return ErrCollected
	}
	return nil
}

// interruptReads stops background reads of blobs, until done is called.
func (s *Packer) interruptReads() (done func()) {
	s.sweepAll.Add(1)
	return func() { s.sweepAll.Add(-1) }
}

// AwaitIdleLocked is the gate of work that holds the representation lock, and can stop between two
// pieces. It fails with packing.ErrInUse when a caller waits for the lock, or a collection
// waits for a blob that is being read; the blob is then packed another time. Compacting uses
// AwaitIdle, because a half of it would leave more bytes on the disk than before.
func (s *Packer) AwaitIdleLocked(ctx context.Context) error {
	if err := s.AwaitIdleRead(ctx); err != nil {
		return err
	}
	if s.st.packing.LockContended() {
		return fmt.Errorf("%w: waiting to pack or unpack", packing.ErrInUse)
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Packer) run(ctx context.Context) {
	tick := time.NewTicker(packEvery)
	defer tick.Stop()
	for {
		s.Sweep(ctx)
		s.Scrub(ctx)
		select {
		case <-ctx.Done():
			return
		case <-s.retryAll:
		case <-tick.C:
			s.RetrySweep()
		}
	}
}

// Sweep does all pending work: it reads blobs, packs, compacts and drops copies.
func (s *Packer) Sweep(ctx context.Context) {
	s.sweeping.Lock()
	defer s.sweeping.Unlock()
	when := s.st.settings.Load().Pack
	if when.When == PackOff {
		return
	}
	if !s.renewed {
		if err := s.st.packing.Sharing.RefreshSketches(ctx, s.AwaitIdle); err != nil &&
			ctx.Err() == nil {
			s.st.log.Warn("cannot replace sketches of another version", "error", err)
		}
		s.renewed = true
	}
	if err := s.readQueued(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, ErrCollected) {
		s.st.log.Warn("cannot compare blobs", "error", err)
	}
	s.mu.Lock()
	due := s.due || when.When == PackAlways
	s.due = false
	s.mu.Unlock()
	if !due {
		return
	}
	if err := s.Pack(ctx, when); err != nil && ctx.Err() == nil {
		s.st.log.Warn("cannot pack builds", "error", err)
	}
}

// takeQueued returns the blobs to read now.
func (s *Packer) takeQueued(ctx context.Context) ([]cas.Digest, error) {
	s.mu.Lock()
	all, fresh := s.all, s.fresh
	s.all, s.fresh = false, nil
	s.mu.Unlock()
	if all {
		return s.UnknownBlobs(ctx)
	}
	return slices.DeleteFunc(fresh, func(d cas.Digest) bool {
		size, err := s.st.cas.Size(d)
		// it was removed, packed, or read in the meantime
		return err != nil || size < packing.MinBlobSize || s.st.packing.Sharing.IsKnown(d)
	}), nil
}

// readQueued reads the queued blobs.
func (s *Packer) readQueued(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			s.mu.Lock()
			s.all = true // the next sweep finds the rest in the index
			s.mu.Unlock()
		}
	}()
	todo, err := s.takeQueued(ctx)
	if err != nil {
		return err
	}
	for i, d := range todo {
		s.toRead.Store(int64(len(todo) - i))
		if err := s.AwaitIdleRead(ctx); err != nil {
			return err
		}
		if _, err := s.st.packing.Sharing.Examine(ctx, d, s.AwaitIdleRead); err != nil {
			if ctx.Err() != nil || errors.Is(err, ErrCollected) {
				return cmp.Or(ctx.Err(), err)
			}
			// otherwise it was removed, or the next request reports the damage
			if !packing.IsMissingOrDamaged(err) {
				s.st.log.Warn("cannot compare a blob", "digest", d.String(), "error", err)
				s.mu.Lock()
				s.failed = append(s.failed[max(0, len(s.failed)+1-maxFresh):], d)
				s.mu.Unlock()
			}
		}
	}
	s.toRead.Store(0)
	return nil
}

// UnknownBlobs lists the whole blobs of builds that have not been read. Blobs of older builds come
// first, because they are the bases of later ones.
func (s *Packer) UnknownBlobs(ctx context.Context) ([]cas.Digest, error) {
	found := make(map[cas.Digest]time.Time)
	err := s.st.index.EachNeed(ctx, cas.Digest{}, func(n index.Need) error {
		d := n.Blob
		if n.Size < packing.MinBlobSize || !s.st.cas.Has(d) || s.st.packing.Sharing.IsKnown(d) {
			return nil
		}
		b, err := s.st.index.Get(n.Build)
		// otherwise it was just removed
		if at, ok := found[d]; err == nil && (!ok || b.Created.Before(at)) {
			found[d] = b.Created
		}
		return nil
	})
	return slices.SortedFunc(maps.Keys(found), func(a, b cas.Digest) int {
		return cmp.Or(found[a].Compare(found[b]), bytes.Compare(a[:], b[:]))
	}), err
}

// Pack packs builds that were not used for long enough. A blob that a warm build needs stays.
func (s *Packer) Pack(ctx context.Context, when Packing) error {
	var worth []cas.Digest
	err := s.st.packing.Sharing.EachShare(ctx, func(d cas.Digest, found packing.Share) error {
		if !s.st.packing.Sharing.DropStale(d, found) && !found.Little {
			worth = append(worth, d) // stale results are checked in the next sweep
		}
		return nil
	})
	if err != nil {
		return err
	}
	cold := make(map[index.BuildID]bool)
	for _, d := range worth {
		ids, err := s.st.index.Needs(d)
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return err
		}
		for _, id := range ids {
			// otherwise it was just removed
			if b, err := s.st.index.Get(id); err == nil && s.isCold(&b, when) &&
				s.PackSaving(id) > 0 {
				cold[id] = true
			}
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(cold), func(a, b index.BuildID) int {
		return bytes.Compare(a[:], b[:])
	}) {
		if err := s.AwaitIdle(ctx); err != nil {
			return err
		}
		_, err := s.PackBuildWith(ctx, id, when, s.AwaitIdleLocked)
		if err != nil && !errors.Is(err, packing.ErrInUse) && !errors.Is(err, index.ErrNotFound) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.st.log.Warn("cannot pack a build", "build", id.String(), "error", err)
		}
	}
	if err := s.compact(ctx, when.After); err != nil {
		return err
	}
	return s.dropCold(ctx, when.After)
}

// dropCold removes unpacked copies that no build has used for that time. It does so with every
// setting of packing, because otherwise copies would never be removed. The next request unpacks the
// blob again. A copy beside a whole blob is never needed.
func (s *Packer) dropCold(ctx context.Context, after time.Duration) error {
	open := s.st.packing.Copies.Store()
	if open == nil {
		return nil
	}
	return open.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		if cold, err := s.allCold(d, Packing{When: PackCold, After: after}); err != nil ||
			!cold && !s.st.cas.Has(d) {
			return err
		}
		if err := s.st.packing.DropCopy(d); !errors.Is(err, packing.ErrInUse) {
			return err
		}
		return nil
	})
}

// isCold reports whether a build may be packed by itself.
func (p *Packer) isCold(b *index.Build, when Packing) bool {
	if _, pinned := p.st.index.Journal.Pinned(b.ID); pinned || p.st.WhyInUse(b) != "" {
		return false
	}
	if when.When == PackAlways {
		return true
	}
	last, _ := p.st.index.Uses.LastUse(b.ID)
	if last.Before(b.Created) {
		last = b.Created
	}
	return p.st.now().Sub(last) >= when.After
}

// allCold reports whether every build that needs a blob may be packed by itself.
func (p *Packer) allCold(d cas.Digest, when Packing) (bool, error) {
	ids, err := p.st.index.Needs(d)
	if err != nil {
		return false, err
	}
	for _, id := range ids {
		if b, err := p.st.index.Get(id); err == nil && !p.isCold(&b, when) {
			return false, nil
		}
	}
	return true, nil
}

// baseIdleTime is how long a base must have been unused before another blob replaces it. It is long
// so that an application which uses one build in the morning and another in the afternoon does not
// make them change roles twice a day.
const baseIdleTime = 24 * time.Hour

// compact replaces idle bases by blobs in use, and removes bases that no build needs.
func (s *Packer) compact(ctx context.Context, after time.Duration) error {
	hot := func(d cas.Digest) bool { return s.usedWithin(d, after) }
	idle := func(d cas.Digest) bool {
		cold, err := s.allCold(d, Packing{When: PackCold, After: max(after, baseIdleTime)})
		return err == nil && cold
	}
	all, err := s.st.packing.CompactableFamilies(ctx, hot, idle)
	if err != nil {
		return err
	}
	for _, f := range all {
		if s.futile[f] || !f.Base.IsZero() && !idle(f.Base) || !f.Hot.IsZero() && !hot(f.Hot) {
			continue
		}
		if err := s.AwaitIdle(ctx); err != nil {
			return err
		}
		err := s.st.packing.Compact(ctx, f, s.AwaitIdle)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !errors.Is(err, packing.ErrInUse) { // retried another time
			s.futile[f] = true // until the next start
			s.st.log.Warn("cannot compact blobs",
				"used", f.Hot.String(), "base", f.Base.String(), "error", err)
		}
	}
	return nil
}

// usedWithin reports whether a build that needs the blob was requested in that time.
func (p *Packer) usedWithin(d cas.Digest, after time.Duration) bool {
	ids, err := p.st.index.Needs(d)
	if err != nil {
		return false // a request reports the error
	}
	return slices.ContainsFunc(ids, func(id index.BuildID) bool {
		last, hits := p.st.index.Uses.LastUse(id)
		return hits > 0 && p.st.now().Sub(last) < after
	})
}
