package store

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store/views"
)

// evictionRounds coordinates the rounds of the collector: the daemon's own, and those that a
// reservation runs because it lacks space. One runs at a time.
type evictionRounds struct {
	running chan struct{} // has one token while a round runs

	// These are guarded by Ledger.mu.
	waiting     int    // reservations that lack space
	lacks       int64  // bytes on disk that they lack
	lackWritten int64  // the part of lacks that is on the disk already
	started     uint64 // number of rounds that have begun
	// futile is the latest round that left the store above its bounds because no more builds could
	// be evicted.
	futile   uint64
	keptText string // the builds that round could not evict, in words
}

// beginRound waits until no other round runs, and begins one. end ends it.
func (s *Ledger) beginRound(ctx context.Context) (end func(), err error) {
	select {
	case s.running <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started++
	return func() { <-s.running }, nil
}

// CountLacking counts the bytes that a reservation lacks, until done. Every round that begins after
// round number begun evicts for it too.
func (s *Ledger) CountLacking(bytes, written int64) (begun uint64, done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	add := func(n int) {
		s.waiting += n
		s.lacks += int64(n) * bytes
		s.lackWritten += int64(n) * written
	}
	add(1)
	return s.started, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		add(-1)
	}
}

// roundFailed reports whether a later round than begun was futile, and which builds it could not
// evict.
func (s *Ledger) roundFailed(begun uint64) (is bool, left string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.futile > begun, s.keptText
}

// evict runs a round of the collector for the reservation, and tries to reserve again. It returns
// the error of the last try. While another round runs, the reservation waits for it, because that
// round may free enough.
func (r *Reservation) evict(ctx context.Context, disk, bytes int64) (err error) {
	s := r.st.ledger
	begun, done := s.CountLacking(disk-r.disk, min(r.Written, disk)-r.counted)
	defer done()
	for range maxRounds {
		end, ended := s.beginRound(ctx)
		if ended != nil {
			return ended
		}
		var final bool
		final, err = r.try(ctx, disk, bytes)
		vain, left := s.roundFailed(begun)
		if err != nil && !final && !vain && !errors.Is(err, errUserFull) {
			r.st.collector.evictToBounds(ctx, nil)
			final, err = r.try(ctx, disk, bytes)
			vain, left = s.roundFailed(begun)
		}
		end()
		if err == nil || final || errors.Is(err, errUserFull) {
			return err
		}
		if vain {
			return withText(err, left)
		}
	}
	return withText(err, "other requests took the space that was freed")
}

func withText(err error, text string) error {
	if e := (*apierr.Error)(nil); errors.As(err, &e) {
		e.Text = strings.TrimSuffix(e.Text+"; "+text, "; ")
	}
	return err
}

// lackedBytes returns the bytes that reservations lack, and how many of them are on the disk
// already.
func (s *Ledger) lackedBytes() (bytes, written int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lacks, s.lackWritten
}

// reservationWaits reports whether a reservation needs space.
func (s *Ledger) reservationWaits() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting > 0
}

// noteFutileRound records that this round leaves the store above its bounds, because no more builds
// may be evicted. left says which builds and why.
func (s *Ledger) noteFutileRound(left string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.futile, s.keptText = s.started, left
}

// errStopSearch ends an iteration early.
var errStopSearch = errors.New("seen")

// EvictableFor reports whether enough of a user's builds can be evicted to keep a reservation
// within the quota. It evicts nothing. mayGo is the evictable bytes, at most as many as necessary.
// If there are fewer, stays says why.
func (c *Collector) EvictableFor(ctx context.Context, r *Reservation, disk,
	bytes int64) (mayGo int64, stays string, err error) {
	b, err := c.st.Bounds()
	if err != nil || bytes == 0 || b.User == 0 && !b.shares(r.user) {
		return 0, "", err
	}
	ctx = context.WithoutCancel(ctx)
	now, err := c.st.usageNow(ctx)
	if err != nil {
		return 0, "", err
	}
	s := c.st.ledger
	s.mu.Lock()
	used := now.users[r.user].LogicalBytes + s.reserved.ByUser[r.user] - r.bytes
	most, _ := s.quotaOf(&now, r, used, disk-bytes)
	s.mu.Unlock()
	above := used + bytes - most
	if most == 0 || bytes > most || above <= 0 {
		return 0, "", nil
	}
	if why := c.whyNoEviction(); why != "" {
		return 0, why, nil
	}
	return c.evictableOfUser(ctx, r.user, now.users[r.user].Builds, above)
}

// evictableOfUser sums a user's evictable builds until they are enough.
func (c *Collector) evictableOfUser(ctx context.Context, uid uint32, builds uint64,
	enough int64) (mayGo int64, stays string, err error) {
	var own views.OwnFiles
	var held int64
	err = c.st.index.EachBrief(ctx, index.BuildID{}, func(one *index.Brief) error {
		if one.UID != uid {
			return nil
		}
		// the daemon's own reads end soon
		if why := c.WhyProtected(one.ID, &own); why != "" && why != KeptReading {
			held += one.LogicalBytes
		} else {
			mayGo += one.LogicalBytes
		}
		if builds--; mayGo >= enough || builds == 0 {
			return errStopSearch
		}
		return nil
	})
	if err != nil && !errors.Is(err, errStopSearch) {
		return 0, "", err
	}
	switch {
	case mayGo >= enough:
	case held == 0:
		stays = "builds being stored take the rest"
	default:
		stays = fmt.Sprintf("%s of them are pinned, in use or served recently", bytesize.Text(held))
	}
	return mayGo, stays, nil
}
