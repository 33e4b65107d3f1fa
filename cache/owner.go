package cache

import (
	"bufio"
	"bytes"
	"os"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// owners tells whose a uid is. The uids that /etc/subuid gives to a user, for containers, are that user's: otherwise
// one person could speak as sixty thousand. Uids that the daemon's user namespace does not map all arrive as the
// kernel's overflow uid, and so count as one by themselves.
type owners struct {
	path string // "/etc/subuid"

	mu     sync.Mutex
	at     time.Time // the file's, when it was read; guarded by mu
	ranges []uidRange
}

type uidRange struct {
	owner        uint32
	start, count uint64
}

// maxSubuid bounds what is read of the file.
const maxSubuid = 1 << 20

// of gives the owner of a uid: itself, unless it lies in somebody's range.
func (o *owners) of(uid uint32) uint32 {
	o.mu.Lock()
	defer o.mu.Unlock()
	info, err := os.Stat(o.path)
	if err != nil || info.Size() > maxSubuid {
		return uid // most machines without containers have no such file
	}
	if !info.ModTime().Equal(o.at) {
		text, err := os.ReadFile(o.path)
		if err != nil {
			return uid
		}
		o.ranges, o.at = parseSubuid(text, uidByName), info.ModTime()
	}
	for _, r := range o.ranges {
		if uint64(uid) >= r.start && uint64(uid)-r.start < r.count {
			return r.owner
		}
	}
	return uid
}

// parseSubuid reads lines of "owner:start:count"; an owner is a name or a number. What cannot be read is passed over.
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

// limiter bounds how often each user may ask for something: burst requests at once, and then one
// in each interval.
type limiter struct {
	burst    int
	interval time.Duration
	now      func() time.Time

	mu   sync.Mutex
	left map[uint32]*rate.Limiter // by user; guarded by mu; a user who is not in it has the whole burst
}

// maxLimited bounds the users that are remembered at one time.
const maxLimited = 1 << 12

// take uses up one request of a user. Where there is none left, it returns after which time there is.
func (l *limiter) take(user uint32) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	own := l.left[user]
	if own == nil {
		if len(l.left) >= maxLimited {
			l.forget(now)
		}
		if len(l.left) >= maxLimited {
			return l.interval, false
		}
		if l.left == nil {
			l.left = make(map[uint32]*rate.Limiter)
		}
		own = rate.NewLimiter(rate.Every(l.interval), l.burst)
		l.left[user] = own
	}
	r := own.ReserveN(now, 1)
	if wait = r.DelayFrom(now); wait > 0 {
		r.CancelAt(now)
		return wait, false
	}
	return 0, true
}

// forget drops the users who have the whole burst again.
func (l *limiter) forget(now time.Time) {
	for user, own := range l.left {
		if own.TokensAt(now) >= float64(l.burst) {
			delete(l.left, user)
		}
	}
}
