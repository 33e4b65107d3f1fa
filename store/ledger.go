package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store/packing"
)

// SpaceOptions bound the space of the store. The zero value has no bounds.
type SpaceOptions struct {
	// Budget bounds the bytes on disk of blobs, manifests, reservations, and files of removed
	// builds that are still open.
	Budget    Amount
	Floor     Amount        // free space to keep on the file system
	MaxUnused time.Duration // builds that were not used for so long are evicted; 0: no limit
	UserBytes Amount        // logical bytes of all builds that one user requested
	// UserShare is the part of the budget that the builds of a bound user keep when space is short,
	// and that its pins may take.
	UserShare Amount
}

// Amount is a number of bytes, or a part of the file system of the state directory. 0: no bound.
type Amount struct {
	Bytes   int64
	Percent float64
}

// of returns the amount in bytes, 0 for no bound.
func (a Amount) of(size int64) int64 {
	if a.Percent > 0 {
		return max(int64(float64(size)/100*a.Percent), 1)
	}
	return a.Bytes
}

// Bounds are SpaceOptions in bytes; 0 is no bound.
type Bounds struct {
	Budget, Floor, User int64
	Share               int64 // share of each user for whom Options.Bound is true
	unused              time.Duration
	Free                int64 // free bytes of the file system now

	bound func(uid uint32) bool // whether a share bounds the user
}

// shares reports whether a share of the budget bounds the user.
func (b *Bounds) shares(uid uint32) bool { return b.Share > 0 && b.bound(uid) }

// ShareOf returns the part of some bytes that the user may take, in the proportion that user_share
// sets for the budget.
func (b *Bounds) ShareOf(uid uint32, bytes int64) int64 {
	if !b.shares(uid) {
		return bytes
	}
	return int64(float64(bytes) * min(float64(b.Share)/float64(b.Budget), 1))
}

// Bounds returns the bounds in effect, and the free space now.
func (st *Store) Bounds() (Bounds, error) {
	o := st.settings.Load().Space
	s, err := diskOf(st.dir)
	if err != nil {
		return Bounds{}, err
	}
	b := Bounds{Budget: o.Budget.of(s.size), Floor: o.Floor.of(s.size),
		User: o.UserBytes.of(s.size), unused: o.MaxUnused, Free: s.free}
	if b.Budget > 0 && st.options.Bound != nil {
		b.Share, b.bound = o.UserShare.of(b.Budget), st.options.Bound
	}
	return b, nil
}

// keepReserve refills the reserve for a full disk, if there is free space above the floor.
func (c *Collector) keepReserve() {
	b, err := c.st.Bounds()
	if err == nil {
		err = c.st.index.Reserve.Replenish(b.Free - b.Floor)
	}
	if err != nil {
		c.st.log.Warn("cannot reserve space for eviction on a full disk", "error", err)
	}
}

// Ledger accounts for reservations of builds that are being stored. The space of a build is
// reserved before a byte of it is written into the store.
//
// Admission: while the store is within its budget, a reservation is admitted even if it exceeds the
// budget, so that a compile does not wait for an eviction that can run at the same time. So the
// budget is exceeded by at most one artefact in flight. While the store is above its budget, a
// reservation is admitted only if it fits, and evicts builds first.
type Ledger struct {
	mu       sync.Mutex
	reserved Reserved // guarded by mu

	// number of releases, to notice bytes that moved to another account; guarded by mu
	releases uint64

	// removing counts the bytes of removed builds until their blobs are removed, because in the
	// meantime no other account has them. Guarded by mu.
	removing int64

	evictionRounds

	wake chan struct{} // wakes the collector
}

func newLedger() *Ledger {
	return &Ledger{reserved: Reserved{ByUser: make(map[uint32]int64)}, wake: make(chan struct{}, 1),
		evictionRounds: evictionRounds{running: make(chan struct{}, 1)}}
}

// errUserFull is ErrNoSpace for a build that only its user's quota does not admit. Builds of other
// users are not evicted for it.
var errUserFull = fmt.Errorf("%w for its user", packing.ErrNoSpace)

// Reserved is the sum of all reservations at one moment, in bytes.
type Reserved struct {
	Disk int64 // on disk
	// Written is the part of Disk that is written already, so that the free space is less by it.
	Written int64
	ByUser  map[uint32]int64 // logical bytes

	// Transient counts bytes on disk that are about to be replaced by fewer, for which space is
	// reserved in addition. The collector evicts no builds for them on its own. Only for a waiting
	// reservation they count.
	Transient int64
}

// Reserved returns the sum of all reservations.
func (s *Ledger) Reserved() Reserved {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.reserved
	now.ByUser = maps.Clone(now.ByUser)
	return now
}

// Reservation is space that is reserved for one build.
type Reservation struct {
	st    *Store
	user  uint32
	disk  int64 // reserved bytes on disk
	bytes int64 // logical

	transient int64 // the part of disk for which the published build counts already, or is about to

	// Written is how many bytes are on the disk already, as output of the compile. They count for
	// the budget but not for the floor. counted is the part of disk that was counted so.
	Written, counted int64

	// above is by how many bytes the store may exceed its budget while a blob is replaced by fewer
	// bytes: at most those that are removed afterwards.
	above int64
}

// WakeCollector asks the collector to check whether something has to be evicted.
func (s *Ledger) WakeCollector() {
	select {
	case s.wake <- struct{}{}:
	default: // woken already
	}
}

// countRemoving counts the disk bytes of a build that was just removed, until done.
func (s *Ledger) countRemoving(disk int64) (done func()) { return s.count(&s.removing, disk) }

// countTransient counts bytes that something smaller is about to replace, until done.
func (s *Ledger) countTransient(disk int64) (done func()) {
	return s.count(&s.reserved.Transient, disk)
}

// count adds to the sum, and done subtracts it again.
func (s *Ledger) count(sum *int64, disk int64) (done func()) {
	add := func(disk int64) {
		s.mu.Lock()
		defer s.mu.Unlock()
		*sum += disk
		s.releases++
	}
	add(disk)
	return func() {
		add(-disk)
		s.WakeCollector() // bytes that were not removed count from now on
	}
}

// SpaceOf returns how many bytes files of these sizes take on the disk with a manifest, if they
// have no holes, and the sum of the sizes.
func SpaceOf(sizes ...int64) (disk, bytes int64) {
	disk = ManifestNeed
	for _, size := range sizes {
		disk += cas.RoundUpToBlock(size)
		bytes += size
	}
	return disk, bytes
}

// ManifestNeed bounds the bytes that nearly every manifest takes on the disk.
const ManifestNeed = 2 * cas.Block

// Unreserved returns an empty reservation of a user.
func (st *Store) Unreserved(user uint32) *Reservation { return &Reservation{st: st, user: user} }

// Reserve reserves space for files of these sizes. The error says with numbers why there is none.
// With evicts it evicts builds first if necessary, and the caller must not hold locks of blobs.
func (st *Store) Reserve(ctx context.Context, user uint32, evicts bool,
	sizes ...int64) (*Reservation, error) {
	r := &Reservation{st: st, user: user}
	return r, r.Resize(ctx, evicts, sizes...)
}

// Resize changes the reservation to files of these sizes. After an error it is unchanged. evicts is
// as for Reserve.
func (r *Reservation) Resize(ctx context.Context, evicts bool, sizes ...int64) error {
	disk, bytes := SpaceOf(sizes...)
	return r.ResizeTo(ctx, evicts, disk, bytes)
}

// ResizeTo is Resize to a number of bytes on disk, and of logical bytes.
func (r *Reservation) ResizeTo(ctx context.Context, evicts bool, disk, bytes int64) error {
	if evicts && r.st.ledger.reservationWaits() {
		return r.evict(ctx, disk, bytes) // queue behind waiting reservations
	}
	final, err := r.try(ctx, disk, bytes)
	if err == nil || final || !evicts || errors.Is(err, errUserFull) {
		return err
	}
	return r.evict(ctx, disk, bytes)
}

// try reserves if there is space, and wakes the collector. final reports that eviction cannot help.
func (r *Reservation) try(ctx context.Context, disk, bytes int64) (final bool, err error) {
	s := r.st.ledger
	defer s.WakeCollector()
	for {
		s.mu.Lock()
		given := s.releases
		s.mu.Unlock()
		mayGo, stays, err := r.st.collector.EvictableFor(ctx, r, disk, bytes)
		if err != nil {
			return true, err
		}
		now, err := r.st.usageNow(ctx)
		if err != nil {
			return true, err
		}
		now.mayGo, now.stays = mayGo, stays
		s.mu.Lock()
		// otherwise bytes may have moved between accounts while these were read
		same := s.releases == given
		if same {
			final, err = s.reserve(&now, r, disk, bytes)
		}
		s.mu.Unlock()
		if same && (final || stays != "" || !errors.Is(err, errUserFull) || ctx.Err() != nil) {
			// otherwise repeat: the user reserved more in the meantime, and more builds can be
			// evicted
			return final, err
		}
	}
}

// reserve reserves the bytes if admit admits them. The caller holds mu.
func (s *Ledger) reserve(now *usageNow, r *Reservation, disk, bytes int64) (final bool, err error) {
	if final, err := s.admit(now, r, disk, bytes); err != nil {
		return final, err
	}
	s.reserved.Disk += disk - r.disk
	s.reserved.Written += min(r.Written, disk) - r.counted
	s.reserved.ByUser[r.user] += bytes - r.bytes
	r.disk, r.bytes, r.counted = disk, bytes, min(r.Written, disk)
	return false, nil
}

// usageNow has the figures of a decision besides the reservations.
type usageNow struct {
	Bounds
	Account
	users map[uint32]index.UserSpace // set if there is a quota
	// mayGo is the evictable logical bytes of the user's builds, at most as many as necessary.
	mayGo int64
	stays string // why others of them are not evictable; "" if all are
}

func (st *Store) usageNow(ctx context.Context) (now usageNow, err error) {
	if now.Bounds, err = st.Bounds(); err != nil {
		return now, err
	}
	if now.User > 0 || now.Share > 0 {
		if now.users, err = st.index.Users(context.WithoutCancel(ctx)); err != nil {
			return now, err
		}
	}
	now.Account, err = st.Account()
	return now, err
}

// admit returns why the bytes may not be reserved, and whether eviction cannot help. The caller
// holds mu.
func (s *Ledger) admit(now *usageNow, r *Reservation, disk, bytes int64) (final bool, err error) {
	b := &now.Bounds
	others := s.reserved.Disk - r.disk + s.removing
	used := now.Counted() + others
	switch {
	case b.Budget > 0 && disk > b.Budget:
		return true, NoSpace("it takes %s on disk, and the whole budget is "+
			"%s", bytesize.Text(disk), bytesize.Text(b.Budget)).
			WithHint("raise budget in [space]")
	case b.Budget > 0 && used > b.Budget && used+disk > b.Budget+r.above:
		return false, NoSpace("it takes %s on disk; of the budget of %s are used: %s by builds, "+
			"%s by removed builds that are still open, %s by builds being stored",
			bytesize.Text(disk), bytesize.Text(b.Budget),
			bytesize.Text(now.Disk+now.Manifests+now.Packed.Sum()), bytesize.Text(now.UnlinkedOpen),
			bytesize.Text(others)).
			WithHint("epcachectl gc -n lists the builds that cannot be evicted, and why; or " +
				"raise budget in [space]")
	case b.Free-(s.reserved.Disk-s.reserved.Written) <
		b.Floor+(disk-min(r.Written, disk))-(r.disk-r.counted) && b.Floor > 0:
		return false, NoSpace("it takes %s on disk; %s are free, of which %s are reserved for "+
			"builds being stored and %s must stay free",
			bytesize.Text(disk), bytesize.Text(b.Free),
			bytesize.Text(others-(s.reserved.Written-r.counted)), bytesize.Text(b.Floor)).
			WithHint("free some space on the disk, or lower free_floor in [space]")
	}
	return s.admitUser(now, r, disk, bytes)
}

// admitUser is admit for the user's quota. Beyond the quota it admits bytes only if enough of the
// user's builds may be evicted.
func (s *Ledger) admitUser(now *usageNow, r *Reservation, disk, bytes int64) (final bool,
	err error) {
	used := now.users[r.user].LogicalBytes + s.reserved.ByUser[r.user] - r.bytes
	most, share := s.quotaOf(now, r, used, disk-bytes)
	switch {
	case bytes == 0 && share && used+disk > most:
		// an estimate, for which other builds might be evicted in vain
		return false, NoSpace("uid %d has used up its quota", r.user)
	case bytes == 0 || most == 0: // copies do not count towards quotas
		return false, nil
	case bytes <= most && used+bytes-now.mayGo <= most:
		return false, nil
	}
	e := NoSpace("it has %s, and uid %d has %s of at most %s", bytesize.Text(bytes), r.user,
		bytesize.Text(used), bytesize.Text(most)).
		WithHint("remove builds that are not needed: epcachectl rm; or raise user_bytes in [space]")
	if share {
		e.Text = fmt.Sprintf("it has %s, and uid %d has %s: together more than its share of %s, "+
			"beyond which no other user's builds are evicted",
			bytesize.Text(bytes), r.user, bytesize.Text(used), bytesize.Text(now.Share))
		e.Hint = "remove builds that are not needed: epcachectl rm; or raise user_share in [space]"
	}
	if e.Err = errUserFull; bytes > most {
		return true, e
	}
	e.Text += fmt.Sprintf(", and would have %s with this build", bytesize.Text(used+bytes))
	if now.stays != "" {
		e.Text += "; " + now.stays
	}
	return false, e
}

// quotaOf returns how many logical bytes the user of a reservation may have, 0 for no limit. used
// are the user's bytes so far, and others the disk bytes of the new build beyond its logical ones.
// share reports that the limit is the user's share of the budget, or more if other users do not
// need that. The caller holds mu.
func (s *Ledger) quotaOf(now *usageNow, r *Reservation, used, others int64) (most int64,
	share bool) {
	b := &now.Bounds
	if !b.shares(r.user) {
		return b.User, false
	}
	left := b.Budget - now.Counted() - (s.reserved.Disk - r.disk + s.removing)
	if b.Floor > 0 {
		left = min(left,
			b.Free-(s.reserved.Disk-s.reserved.Written)-b.Floor+(r.disk-r.counted)+r.Written)
	}
	most = max(b.Share, used+left-max(others, 0))
	if b.User > 0 && b.User < most {
		return b.User, false
	}
	return most, true
}

// NoSpace returns an error for missing space, which wraps packing.ErrNoSpace.
func NoSpace(format string, args ...any) *apierr.Error {
	e := apierr.New(apierr.NoSpace, nil, format, args...)
	e.Err = packing.ErrNoSpace
	return e
}

// releaseQuota ends the reservation's part of its user's quota, because the published build counts
// from now on. If both counted, a plan of that moment would evict one build too many.
func (r *Reservation) releaseQuota() {
	if r == nil {
		return
	}
	s := r.st.ledger
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reserved.ByUser[r.user] -= r.bytes; s.reserved.ByUser[r.user] <= 0 {
		delete(s.reserved.ByUser, r.user)
	}
	r.bytes = 0
	// until Release the bytes count twice, for which no build may be evicted
	s.reserved.Transient += r.disk - r.transient
	r.transient = r.disk
}

// Release releases the space. It may be called more than once, and on nil.
func (r *Reservation) Release() {
	if r == nil {
		return
	}
	r.releaseQuota()
	s := r.st.ledger
	s.mu.Lock()
	if r.disk != 0 {
		s.releases++
	}
	s.reserved.Disk -= r.disk
	s.reserved.Written -= r.counted
	s.reserved.Transient -= r.transient
	r.disk, r.counted, r.transient = 0, 0, 0
	s.mu.Unlock()
	s.WakeCollector()
}

// Account has the bytes that count against the budget, besides the reservations.
type Account struct {
	Disk, Manifests int64 // of stored builds
	UnlinkedOpen    int64 // files of removed builds that are still open
	Packed          packing.Space
}

// Counted returns the sum of the account.
func (a *Account) Counted() int64 { return a.Disk + a.Manifests + a.UnlinkedOpen + a.Packed.Sum() }

// Account returns the current account.
func (st *Store) Account() (Account, error) {
	s, err := st.index.Space()
	if err != nil {
		return Account{}, err
	}
	packed, err := st.packing.Space(false)
	return Account{Disk: s.DiskBytes, Manifests: s.ManifestBytes,
		UnlinkedOpen: st.views.UnlinkedOpenBytes(), Packed: packed}, err
}

// WholeBytes returns how many bytes the whole file of a blob takes on the disk, in whole blocks.
func (st *Store) WholeBytes(d cas.Digest) (int64, error) { return cas.DiskBytesIn(st.dir, d) }
