package cache

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

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// What blobs share is looked for after their builds were answered, one blob at a time, while nobody asks for anything and nothing is
// compiled. The queue is the index: a blob without a share has not been looked at, so a restart goes on where the last run ended. All of it is
// read at the start, and when settings have changed; else those blobs are looked at that have come since, or have
// another form, so that a build costs the same in a store of a million.

// When builds are packed.
const (
	PackCold   = "cold"   // those that were not used for a while
	PackAlways = "always" // as soon as nobody holds them
	PackOff    = "off"    // only when somebody says so; nothing is looked for by itself either
)

const (
	defaultPackAfter = 2 * time.Hour
	packEvery        = 10 * time.Minute      // how often cold builds are looked for
	gateWait         = 20 * time.Millisecond // how often it is looked whether somebody still asks
	mostPause        = 20 * time.Millisecond // between two reads
)

// packWhen are the settings with their defaults filled in.
type packWhen struct {
	when  string
	after time.Duration // without use
}

func (o *Options) packWhen() (packWhen, error) {
	p := packWhen{when: o.Pack, after: o.PackAfter}
	switch p.when {
	case "":
		p.when = PackCold
	case PackCold, PackAlways, PackOff:
	default:
		return p, fmt.Errorf("pack: %q is none of %q, %q and %q", p.when, PackCold, PackAlways, PackOff)
	}
	if p.after < 0 {
		return p, fmt.Errorf("pack after %s: it cannot be less than nothing", p.after)
	}
	if p.after == 0 {
		p.after = defaultPackAfter
	}
	return p, nil
}

// sharing is the background work.
type sharing struct {
	c     *Cache
	again chan struct{} // there may be something to look at
	asked atomic.Int64  // requests under way
	keeps atomic.Int64  // collections that wait until blobs that are read may be removed
	left  atomic.Int64  // blobs that are still to be looked at, as of the last time that they were counted

	sweeping sync.Mutex              // held while blobs are looked at and builds are packed
	renewed  bool                    // sketches of other versions are gone; guarded by sweeping
	futile   map[packing.Family]bool // what could not be compacted; guarded by sweeping

	mu     sync.Mutex
	fresh  []cas.Digest // of builds that were stored, and whose form has changed, in that order; guarded by mu
	failed []cas.Digest // could not be looked at; guarded by mu
	all    bool         // there may be others besides; guarded by mu
	due    bool         // builds may be cold that were not; guarded by mu

	pace sync.Mutex // one read at a time begins
	last time.Time  // when the gate last opened; guarded by pace
}

func (s *sharing) start(ctx context.Context, c *Cache) {
	s.c, s.again, s.futile = c, make(chan struct{}, 1), make(map[packing.Family]bool)
	c.work.Go(func() { s.run(ctx) })
	s.wake()
}

// wake has all blobs looked at that nothing is known of.
func (s *sharing) wake() {
	s.mu.Lock()
	s.all, s.due = true, true
	s.mu.Unlock()
	s.tell()
}

// tick has builds packed that have become cold, and what failed tried again.
func (s *sharing) tick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.due = true
	for _, d := range s.failed {
		s.remember(d)
	}
	s.failed = nil
}

// remember has a blob looked at the next time; mu is held.
func (s *sharing) remember(d cas.Digest) {
	if len(s.fresh) >= maxFresh {
		s.fresh, s.all = nil, true
	}
	if !s.all {
		s.fresh = append(s.fresh, d)
	}
}

// changed has a blob looked at once more, but not at once: it was made whole again, or has no base
// to take from any more.
func (s *sharing) changed(d cas.Digest) {
	s.mu.Lock()
	s.remember(d)
	s.mu.Unlock()
}

// maxFresh bounds what is remembered one by one.
const maxFresh = 1 << 12

// added has the blobs of a build looked at that was stored just now.
func (s *sharing) added(b *index.Build) {
	s.mu.Lock()
	for d, size := range distinctBlobs(b) {
		if size >= packing.Least {
			s.remember(d)
		}
	}
	s.mu.Unlock()
	s.tell()
}

func (s *sharing) tell() {
	select {
	case s.again <- struct{}{}:
	default: // said already
	}
}

// asking is called for each request, and what it returns at its end.
func (s *sharing) asking() (done func()) {
	s.asked.Add(1)
	return func() { s.asked.Add(-1) }
}

// gate opens when nobody wants anything, and then for half of the time: what is done for nobody takes half of a processor
// at most, for other programs want to run as well. It is open while somebody waits for the turn in which forms are changed, or a collection
// for a blob that is just read: whoever is kept here may have that, and requests may wait for who wants it, such as the collector.
func (s *sharing) gate(ctx context.Context) error {
	s.pace.Lock()
	defer s.pace.Unlock()
	pause := min(time.Since(s.last), mostPause)
	for {
		if s.c.forms.TurnWanted() || s.keeps.Load() > 0 {
			s.last = time.Now()
			return ctx.Err()
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
		if s.asked.Load() == 0 && s.c.flights.count() == 0 {
			s.last = time.Now()
			return nil
		}
		pause = gateWait
	}
}

// errCollected says that blobs are not read on, because a collection waits to remove them.
var errCollected = fmt.Errorf("%w: it is just collected", packing.ErrInUse)

// reading is the gate of what only reads and can be given up between two pieces: it closes for
// good, with errCollected, when a collection waits for the blobs. They are looked at another time.
func (s *sharing) reading(ctx context.Context) error {
	if err := s.gate(ctx); err != nil {
		return err
	}
	if s.keeps.Load() > 0 {
		return errCollected
	}
	return nil
}

// collecting ends what reads blobs for no request, until done is called.
func (s *sharing) collecting() (done func()) {
	s.keeps.Add(1)
	return func() { s.keeps.Add(-1) }
}

// yield is the gate of what has the turn and can be given up between two pieces: it closes for
// good, with forms.ErrInUse, when a caller waits for the turn, or a collection for what is read.
// The blob is packed another time.
// Compacting, which would leave more on the disk than was there before, half done, has the other
// gate.
func (s *sharing) yield(ctx context.Context) error {
	if err := s.reading(ctx); err != nil {
		return err
	}
	if s.c.forms.TurnWanted() {
		return fmt.Errorf("%w: the turn in which forms are changed", packing.ErrInUse)
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

func (s *sharing) run(ctx context.Context) {
	tick := time.NewTicker(packEvery)
	defer tick.Stop()
	for {
		s.sweep(ctx)
		select {
		case <-ctx.Done():
			return
		case <-s.again:
		case <-tick.C:
			s.tick()
		}
	}
}

// PackNow does at once what is done every ten minutes while the cache is open: it looks at what has
// come, packs cold builds and removes unpacked copies that are no longer used. Requests come first,
// so it may take its time. What fails is logged, and tried again the next time. It fails only where
// ctx ends.
func (c *Cache) PackNow(ctx context.Context) error {
	c.sharing.wake()
	c.sharing.sweep(ctx)
	return ctx.Err()
}

// sweep goes over all that there is to do.
func (s *sharing) sweep(ctx context.Context) {
	s.sweeping.Lock()
	defer s.sweeping.Unlock()
	when := s.c.settings.Load().pack
	if when.when == PackOff {
		return
	}
	if !s.renewed {
		if err := s.c.forms.Sharing.Renew(ctx, s.gate); err != nil && ctx.Err() == nil {
			s.c.log.Warn("sketches of another version not made anew", "error", err)
		}
		s.renewed = true
	}
	if err := s.look(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, errCollected) {
		s.c.log.Warn("what blobs share was not found out", "error", err)
	}
	s.mu.Lock()
	due := s.due || when.when == PackAlways
	s.due = false
	s.mu.Unlock()
	if !due {
		return
	}
	if err := s.pack(ctx, when); err != nil && ctx.Err() == nil {
		s.c.log.Warn("builds not packed", "error", err)
	}
}

// todo takes the blobs that are to be looked at now.
func (s *sharing) todo(ctx context.Context) ([]cas.Digest, error) {
	s.mu.Lock()
	all, fresh := s.all, s.fresh
	s.all, s.fresh = false, nil
	s.mu.Unlock()
	if all {
		return s.unknown(ctx)
	}
	return slices.DeleteFunc(fresh, func(d cas.Digest) bool {
		size, err := s.c.cas.Size(d)
		return err != nil || size < packing.Least || s.c.forms.Sharing.LookedAt(d) // it has gone, is packed, or was looked at
	}), nil
}

// look goes through the blobs that were not looked at yet.
func (s *sharing) look(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			s.mu.Lock()
			s.all = true // what was taken and not looked at is found in the index, with the next one that comes
			s.mu.Unlock()
		}
	}()
	todo, err := s.todo(ctx)
	if err != nil {
		return err
	}
	for i, d := range todo {
		s.left.Store(int64(len(todo) - i))
		if err := s.reading(ctx); err != nil {
			return err
		}
		if _, err := s.c.forms.Sharing.LookAt(ctx, d, s.reading); err != nil {
			if ctx.Err() != nil || errors.Is(err, errCollected) {
				return cmp.Or(ctx.Err(), err)
			}
			if !packing.Lost(err) { // else it went, or whoever asks for it will find out
				s.c.log.Warn("blob not looked at", "digest", d.String(), "error", err)
				s.mu.Lock()
				s.failed = append(s.failed[max(0, len(s.failed)+1-maxFresh):], d)
				s.mu.Unlock()
			}
		}
	}
	s.left.Store(0)
	return nil
}

// unknown lists the whole blobs of builds that nothing is known of, those of older builds first: they are the containers of later ones.
func (s *sharing) unknown(ctx context.Context) ([]cas.Digest, error) {
	found := make(map[cas.Digest]time.Time)
	err := s.c.index.EachNeed(ctx, func(n index.Need) error {
		d := n.Blob
		if n.Size < packing.Least || !s.c.cas.Has(d) || s.c.forms.Sharing.LookedAt(d) {
			return nil
		}
		b, err := s.c.index.Get(n.Build)
		if at, ok := found[d]; err == nil && (!ok || b.Created.Before(at)) { // else it has just gone
			found[d] = b.Created
		}
		return nil
	})
	return slices.SortedFunc(maps.Keys(found), func(a, b cas.Digest) int {
		return cmp.Or(found[a].Compare(found[b]), bytes.Compare(a[:], b[:]))
	}), err
}

// pack packs the builds that have not been used for long enough. A blob that a warm build needs as well stays.
func (s *sharing) pack(ctx context.Context, when packWhen) error {
	var worth []cas.Digest
	err := s.c.forms.Sharing.EachShare(ctx, func(d cas.Digest, found packing.Share) error {
		if !s.c.forms.Sharing.DropStale(d, found) && !found.Little {
			worth = append(worth, d) // what is stale is looked at again, the next time
		}
		return nil
	})
	if err != nil {
		return err
	}
	cold := make(map[index.BuildID]bool)
	for _, d := range worth {
		ids, err := s.c.index.Needs(d)
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return err
		}
		for _, id := range ids {
			if b, err := s.c.index.Get(id); err == nil && s.c.cold(&b, when) && s.c.packSaving(id) > 0 { // else it has just gone
				cold[id] = true
			}
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(cold), func(a, b index.BuildID) int { return bytes.Compare(a[:], b[:]) }) {
		if err := s.gate(ctx); err != nil {
			return err
		}
		_, err := s.c.packBuildWith(ctx, id, when, s.yield)
		if err != nil && !errors.Is(err, packing.ErrInUse) && !errors.Is(err, index.ErrNotFound) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.c.log.Warn("build not packed", "build", id.String(), "error", err)
		}
	}
	if err := s.compact(ctx, when.after); err != nil {
		return err
	}
	return s.dropCold(ctx, when.after)
}

// dropCold removes the unpacked forms of builds that were not used for so long, however soon builds are packed: the next request makes them again,
// and else a copy that was made once would stay for good. Of a blob that is whole by now there is no need for one.
func (s *sharing) dropCold(ctx context.Context, after time.Duration) error {
	open := s.c.forms.Copies.Store()
	if open == nil {
		return nil
	}
	return open.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		if cold, err := s.c.allCold(d, packWhen{when: PackCold, after: after}); err != nil || !cold && !s.c.cas.Has(d) {
			return err
		}
		if err := s.c.forms.DropCopy(d); !errors.Is(err, packing.ErrInUse) {
			return err
		}
		return nil
	})
}

// cold tells whether a build may be packed by itself.
func (c *Cache) cold(b *index.Build, when packWhen) bool {
	if _, pinned := c.index.Journal.Pinned(b.ID); pinned || c.busy(b) != "" {
		return false
	}
	if when.when == PackAlways {
		return true
	}
	last, _ := c.index.Uses.Last(b.ID)
	if last.Before(b.Created) {
		last = b.Created
	}
	return c.now().Sub(last) >= when.after
}

// allCold tells whether every build that needs a blob may be packed by itself.
func (c *Cache) allCold(d cas.Digest, when packWhen) (bool, error) {
	ids, err := c.index.Needs(d)
	if err != nil {
		return false, err
	}
	for _, id := range ids {
		b, err := c.index.Get(id)
		if err == nil && !c.cold(&b, when) {
			return false, nil
		}
	}
	return true, nil
}

// idleFor is for how long a base must not have been used before another blob takes its place: an
// application that uses one build in the morning and another one in the afternoon shall not have
// them change places twice a day.
const idleFor = 24 * time.Hour

// compact has blobs that are used take the place of bases that are idle, and removes bases that no
// build needs.
func (s *sharing) compact(ctx context.Context, after time.Duration) error {
	hot := func(d cas.Digest) bool { return s.c.usedWithin(d, after) }
	idle := func(d cas.Digest) bool {
		cold, err := s.c.allCold(d, packWhen{when: PackCold, after: max(after, idleFor)})
		return err == nil && cold
	}
	all, err := s.c.forms.Families(ctx, hot, idle)
	if err != nil {
		return err
	}
	for _, f := range all {
		if s.futile[f] || !f.Base.IsZero() && !idle(f.Base) || !f.Hot.IsZero() && !hot(f.Hot) {
			continue
		}
		if err := s.gate(ctx); err != nil {
			return err
		}
		err := s.c.forms.Compact(ctx, f, s.gate)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !errors.Is(err, packing.ErrInUse) { // else another time
			s.futile[f] = true // until the next start
			s.c.log.Warn("blobs not compacted",
				"used", f.Hot.String(), "base", f.Base.String(), "error", err)
		}
	}
	return nil
}

// usedWithin reports whether some build that needs the blob was asked for in that time.
func (c *Cache) usedWithin(d cas.Digest, after time.Duration) bool {
	ids, err := c.index.Needs(d)
	if err != nil {
		return false // a request for it finds out
	}
	return slices.ContainsFunc(ids, func(id index.BuildID) bool {
		last, hits := c.index.Uses.Last(id)
		return hits > 0 && c.now().Sub(last) < after
	})
}
