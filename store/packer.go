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

// The packer finds out what blobs share one at a time, while no request and no compile runs. The
// index is the queue, so that a restart continues: a blob without a share is still to be read. The
// packer reads the index at the start and when settings have changed, else only new and changed
// blobs, so that a build costs the same in a large store.

// When builds are packed.
const (
	PackCold   = "cold"   // those that were not used for a while
	PackAlways = "always" // as soon as no process holds them
	PackOff    = "off"    // only on request; no blob is read by itself either
)

const (
	DefaultPackAfter = 2 * time.Hour
	packEvery        = 10 * time.Minute      // how often cold builds are looked for
	gateWait         = 20 * time.Millisecond // how often it checks for requests under way
	maxPause         = 20 * time.Millisecond // between two reads
)

// Packing says when builds are packed, with all defaults filled in.
type Packing struct {
	When  string
	After time.Duration // without use
}

// Packer finds out in the background what blobs share, packs cold builds and drops unused copies.
type Packer struct {
	st             *Store
	retryAll       chan struct{} // there may be something to look at
	activeRequests atomic.Int64  // requests under way
	sweepAll       atomic.Int64  // collections that wait until blobs that are read may be removed
	// blobs that are still to be looked at, as of the last time that they were counted
	toRead atomic.Int64

	sweeping sync.Mutex              // held while blobs are looked at and builds are packed
	renewed  bool                    // sketches of other versions are gone; guarded by sweeping
	futile   map[packing.Family]bool // what could not be compacted; guarded by sweeping

	mu     sync.Mutex
	fresh  []cas.Digest // of new builds, or in another form, as they came; guarded by mu
	failed []cas.Digest // could not be looked at; guarded by mu
	all    bool         // there may be others besides; guarded by mu
	due    bool         // builds may be cold that were not; guarded by mu

	slowly *rate.Limiter // of the scrub

	pace sync.Mutex // one read at a time begins
	last time.Time  // when the gate last opened; guarded by pace
}

// RequestSweep has all blobs looked at of which nothing is known, and cold builds packed.
func (s *Packer) RequestSweep() {
	s.mu.Lock()
	s.all, s.due = true, true
	s.mu.Unlock()
	s.signal()
}

// RetrySweep has the next sweep pack builds that have become cold, and retry failed blobs.
func (s *Packer) RetrySweep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.due = true
	for _, d := range s.failed {
		s.enqueue(d)
	}
	s.failed = nil
}

// enqueue has a blob looked at the next time; mu is held.
func (s *Packer) enqueue(d cas.Digest) {
	if len(s.fresh) >= maxFresh {
		s.fresh, s.all = nil, true
	}
	if !s.all {
		s.fresh = append(s.fresh, d)
	}
}

// EnqueueChanged has a blob read again later: it was made whole, or lost its base.
func (s *Packer) EnqueueChanged(d cas.Digest) {
	s.mu.Lock()
	s.enqueue(d)
	s.mu.Unlock()
}

// maxFresh bounds what is remembered one by one.
const maxFresh = 1 << 12

// EnqueueBuild has the blobs of a new build looked at.
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
	default: // said already
	}
}

// Remaining returns how many blobs are still to be looked at.
func (s *Packer) Remaining() int64 { return s.toRead.Load() }

// Pending reports whether the next sweep looks at all blobs, and which blobs it could not read.
func (s *Packer) Pending() (all bool, failed []cas.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all, slices.Clone(s.failed)
}

// BeginRequest is called for each request, and what it returns at its end.
func (s *Packer) BeginRequest() (done func()) {
	s.activeRequests.Add(1)
	return func() { s.activeRequests.Add(-1) }
}

// AwaitIdle blocks while a request or a compile is under way, and then lets background work run for
// half of the time, because other programs need the processor as well. It returns at once while a
// caller waits for the form lock, or a collection for a blob that is being read: the work that is
// kept here may hold that, and requests may wait for the collector.
func (s *Packer) AwaitIdle(ctx context.Context) error {
	s.pace.Lock()
	defer s.pace.Unlock()
	pause := min(time.Since(s.last), maxPause)
	for {
		if s.st.forms.FormLockContended() || s.sweepAll.Load() > 0 {
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

// ErrCollected says that a blob is not read on, because a collection waits to remove it.
var ErrCollected = fmt.Errorf("%w: it is being evicted", packing.ErrInUse)

// AwaitIdleRead is the gate of work that only reads, and can be given up between two pieces. It
// closes for good, with ErrCollected, when a collection waits for the blobs: they are looked at
// another time.
func (s *Packer) AwaitIdleRead(ctx context.Context) error {
	if err := s.AwaitIdle(ctx); err != nil {
		return err
	}
	if s.sweepAll.Load() > 0 {
		return ErrCollected
	}
	return nil
}

// interruptReads ends what reads blobs for no request, until done is called.
func (s *Packer) interruptReads() (done func()) {
	s.sweepAll.Add(1)
	return func() { s.sweepAll.Add(-1) }
}

// AwaitIdleLocked is the gate of work that holds the form lock, and can be given up between two
// pieces. It closes for good, with packing.ErrInUse, when a caller waits for the lock, or a
// collection for a blob that is read: the blob is packed another time. Compacting has
// the other gate, because half of it leaves more on the disk than there was before.
func (s *Packer) AwaitIdleLocked(ctx context.Context) error {
	if err := s.AwaitIdleRead(ctx); err != nil {
		return err
	}
	if s.st.forms.FormLockContended() {
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

// Sweep does all that there is to do now: it looks at blobs, packs, compacts and drops copies.
func (s *Packer) Sweep(ctx context.Context) {
	s.sweeping.Lock()
	defer s.sweeping.Unlock()
	when := s.st.settings.Load().Pack
	if when.When == PackOff {
		return
	}
	if !s.renewed {
		if err := s.st.forms.Sharing.RefreshSketches(ctx, s.AwaitIdle); err != nil &&
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

// takeQueued takes the blobs that are to be looked at now.
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
		// it was removed, is packed, or was looked at
		return err != nil || size < packing.MinBlobSize || s.st.forms.Sharing.IsKnown(d)
	}), nil
}

// readQueued goes through the blobs that were not looked at yet.
func (s *Packer) readQueued(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			s.mu.Lock()
			s.all = true // the index finds the rest, with the next new blob
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
		if _, err := s.st.forms.Sharing.Examine(ctx, d, s.AwaitIdleRead); err != nil {
			if ctx.Err() != nil || errors.Is(err, ErrCollected) {
				return cmp.Or(ctx.Err(), err)
			}
			// else it was removed, or the next request finds out
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

// UnknownBlobs lists the whole blobs of builds that nothing is known of. Blobs of older builds come
// first, because they are the bases of later ones.
func (s *Packer) UnknownBlobs(ctx context.Context) ([]cas.Digest, error) {
	found := make(map[cas.Digest]time.Time)
	err := s.st.index.EachNeed(ctx, cas.Digest{}, func(n index.Need) error {
		d := n.Blob
		if n.Size < packing.MinBlobSize || !s.st.cas.Has(d) || s.st.forms.Sharing.IsKnown(d) {
			return nil
		}
		b, err := s.st.index.Get(n.Build)
		// else it has just gone
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
	err := s.st.forms.Sharing.EachShare(ctx, func(d cas.Digest, found packing.Share) error {
		if !s.st.forms.Sharing.DropStale(d, found) && !found.Little {
			worth = append(worth, d) // what is stale is looked at again, the next time
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
			// else it has just gone
			if b, err := s.st.index.Get(id); err == nil && s.st.packer.isCold(&b, when) &&
				s.st.packer.PackSaving(id) > 0 {
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
		_, err := s.st.packer.PackBuildWith(ctx, id, when, s.AwaitIdleLocked)
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

// dropCold removes unpacked forms that no build used for so long, whatever the packing setting:
// else each copy stays for good. The next request makes it again. A whole blob needs none.
func (s *Packer) dropCold(ctx context.Context, after time.Duration) error {
	open := s.st.forms.Copies.Store()
	if open == nil {
		return nil
	}
	return open.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		if cold, err := s.st.packer.allCold(d, Packing{When: PackCold, After: after}); err != nil ||
			!cold && !s.st.cas.Has(d) {
			return err
		}
		if err := s.st.forms.DropCopy(d); !errors.Is(err, packing.ErrInUse) {
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

// baseIdleTime is for how long a base must not have been used before another blob takes its place:
// an application that uses one build in the morning and another one in the afternoon shall not have
// them change places twice a day.
const baseIdleTime = 24 * time.Hour

// compact replaces idle bases by blobs that are used, and removes bases that no build needs.
func (s *Packer) compact(ctx context.Context, after time.Duration) error {
	hot := func(d cas.Digest) bool { return s.st.packer.usedWithin(d, after) }
	idle := func(d cas.Digest) bool {
		cold, err := s.st.packer.allCold(d,
			Packing{When: PackCold, After: max(after, baseIdleTime)})
		return err == nil && cold
	}
	all, err := s.st.forms.CompactableFamilies(ctx, hot, idle)
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
		err := s.st.forms.Compact(ctx, f, s.AwaitIdle)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !errors.Is(err, packing.ErrInUse) { // else another time
			s.futile[f] = true // until the next start
			s.st.log.Warn("cannot compact blobs",
				"used", f.Hot.String(), "base", f.Base.String(), "error", err)
		}
	}
	return nil
}

// usedWithin reports whether some build that needs the blob was asked for in that time.
func (p *Packer) usedWithin(d cas.Digest, after time.Duration) bool {
	ids, err := p.st.index.Needs(d)
	if err != nil {
		return false // a request for it finds out
	}
	return slices.ContainsFunc(ids, func(id index.BuildID) bool {
		last, hits := p.st.index.Uses.LastUse(id)
		return hits > 0 && p.st.now().Sub(last) < after
	})
}
