// Package rights decides which user may see, change and publish which builds.
package rights

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/epcached/epcached/index"
)

// Peer is the process that sends a request.
type Peer struct {
	UID, GID uint32
	PID      int32
}

// Shared is the scope of builds that are served to all users. Lists show a user only some of them:
// see MaySee.
const Shared = "shared"

// OwnScope returns the scope of the builds that only this user gets.
func OwnScope(p Peer) string { return "uid:" + strconv.FormatUint(uint64(p.UID), 10) }

// Privileged lists the users of the configuration that may do more than others.
type Privileged struct {
	Administrators []uint32 // besides root and the daemon's own user
	Publishers     []uint32 // may publish builds for all users, besides administrators
}

// Rights decides which user may see, change and publish builds. It is safe for concurrent use.
type Rights struct {
	uid        uint32
	index      *index.Index
	privileged func() Privileged
	log        *slog.Logger
}

// New returns the rights in the store of the daemon's user uid. It calls privileged for each
// decision, because the configuration may change.
func New(uid uint32, x *index.Index, privileged func() Privileged, log *slog.Logger) *Rights {
	return &Rights{uid, x, privileged, log}
}

// IsAdministrator reports whether the peer may see and change all builds.
func (r *Rights) IsAdministrator(p Peer) bool {
	return p.UID == 0 || p.UID == r.uid || slices.Contains(r.privileged().Administrators, p.UID)
}

// IsPublisher reports whether the peer may put builds that are shared.
func (r *Rights) IsPublisher(p Peer) bool {
	return r.IsAdministrator(p) || slices.Contains(r.privileged().Publishers, p.UID)
}

// MayChange reports whether the peer may change the builds of a scope.
func (r *Rights) MayChange(p Peer, scope string) bool {
	return r.IsAdministrator(p) || scope == OwnScope(p)
}

// MaySee reports whether the peer may see the build that has this id and scope: one of its own, or
// a shared one that it was served before, because that proves that it has the model.
func (r *Rights) MaySee(p Peer, id index.BuildID, scope string) bool {
	if r.MayChange(p, scope) {
		return true
	}
	if scope != Shared {
		return false
	}
	_, ok := r.index.Memos.Get(seenKey(p, id))
	return ok
}

// MayKnow is MaySee for a caller that has not read the scope of the build. It reports false for a
// build that is not in the index.
func (r *Rights) MayKnow(p Peer, id index.BuildID) bool {
	if r.IsAdministrator(p) {
		return true
	}
	b, err := r.index.Get(id)
	return err == nil && r.MaySee(p, id, b.Scope)
}

// MaySeeEvent reports whether the peer may see an event: one of the machine, one of a build that it
// may see or could see before the build was removed, or one of its own requests.
func (r *Rights) MaySeeEvent(p Peer, e *index.Event) bool {
	switch {
	case e.RequestKey == index.RequestKey{} || r.MayChange(p, e.Scope):
		return true
	case e.BuildID.IsZero():
		return false
	case e.Scope == "": // written by an earlier epcached
		return r.MayKnow(p, e.BuildID)
	}
	return r.MaySee(p, e.BuildID, e.Scope)
}

// RecordSeen records that the peer was served a shared build, which may then be listed to it.
func (r *Rights) RecordSeen(p Peer, b *index.Build) {
	if b.Scope != Shared || r.IsAdministrator(p) {
		return
	}
	key := seenKey(p, b.ID)
	if _, ok := r.index.Memos.Get(key); ok {
		return
	}
	if err := r.index.Memos.Save(key, []byte{1}); err != nil {
		r.log.Warn("cannot record a use", "error", err)
	}
}

func seenKey(p Peer, id index.BuildID) []byte {
	return fmt.Appendf(nil, "seen:%d:%s", p.UID, id)
}

// Limiter is a rate limit for each user: Burst requests at once, then one in each Interval.
type Limiter struct {
	Burst    int
	Interval time.Duration
	Now      func() time.Time

	mu sync.Mutex
	// by user; guarded by mu; a user without an entry has the whole burst
	tokens map[uint32]*rate.Limiter
}

// maxLimited bounds the entries in tokens.
const maxLimited = 1 << 12

// Allow takes one request from the user's limit, or returns how long the user has to wait for the
// next one.
func (l *Limiter) Allow(user uint32) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.Now()
	own := l.tokens[user]
	if own == nil {
		if len(l.tokens) >= maxLimited {
			l.forget(now)
		}
		if len(l.tokens) >= maxLimited {
			return l.Interval, false
		}
		if l.tokens == nil {
			l.tokens = make(map[uint32]*rate.Limiter)
		}
		own = rate.NewLimiter(rate.Every(l.Interval), l.Burst)
		l.tokens[user] = own
	}
	r := own.ReserveN(now, 1)
	if wait = r.DelayFrom(now); wait > 0 {
		r.CancelAt(now)
		return wait, false
	}
	return 0, true
}

// forget drops the users that have the whole burst again.
func (l *Limiter) forget(now time.Time) {
	for user, own := range l.tokens {
		if own.TokensAt(now) >= float64(l.Burst) {
			delete(l.tokens, user)
		}
	}
}

// Owners finds the user behind a uid. The uids that /etc/subuid gives to a user for containers
// count as that user, because otherwise one user could act as 65,536. Uids that the daemon's user
// namespace does not map arrive as the kernel's overflow uid, so they count as one user together.
type Owners struct {
	Path string // of the file; "": SubUIDs

	read atomic.Pointer[subUIDs] // nil until the file is read
}

// subUIDs is the content of the file, and its mtime when it was read.
type subUIDs struct {
	at     time.Time
	ranges []uidRange
}

type uidRange struct {
	owner        uint32
	start, count uint64
}

// SubUIDs is the system's file of these ranges.
const SubUIDs = "/etc/subuid"

// maxSubuid bounds the bytes that are read of the file.
const maxSubuid = 1 << 20

// OwnerOf returns the owner of a uid: the uid itself, unless it lies in the range of another user.
func (o *Owners) OwnerOf(uid uint32) uint32 {
	path := cmp.Or(o.Path, SubUIDs)
	info, err := os.Stat(path)
	if err != nil || info.Size() > maxSubuid {
		return uid // most machines without containers have no such file
	}
	known := o.read.Load()
	if known == nil || !info.ModTime().Equal(known.at) {
		text, err := os.ReadFile(path)
		if err != nil {
			return uid
		}
		known = &subUIDs{info.ModTime(), parseSubuid(text, uidByName)}
		o.read.Store(known)
	}
	for _, r := range known.ranges {
		if uint64(uid) >= r.start && uint64(uid)-r.start < r.count {
			return r.owner
		}
	}
	return uid
}

// parseSubuid reads lines of "owner:start:count"; an owner is a name or a number. Other lines are
// skipped.
func parseSubuid(text []byte, byName func(string) (uint32, bool)) []uidRange {
	var out []uidRange
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		parts := strings.Split(strings.TrimSpace(lines.Text()), ":")
		if len(parts) != 3 {
			continue
		}
		start, err1 := strconv.ParseUint(parts[1], 10, 32)
		count, err2 := strconv.ParseUint(parts[2], 10, 33)
		if err1 != nil || err2 != nil {
			continue
		}
		if owner, err := strconv.ParseUint(parts[0], 10, 32); err == nil {
			out = append(out, uidRange{uint32(owner), start, count})
		} else if owner, ok := byName(parts[0]); ok {
			out = append(out, uidRange{owner, start, count})
		}
	}
	return out
}

func uidByName(name string) (uint32, bool) {
	u, err := user.Lookup(name)
	if err != nil {
		return 0, false
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	return uint32(uid), err == nil
}
