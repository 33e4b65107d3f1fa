package rights

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limiter bounds how often each user may ask for something: Burst requests at once, and then one in
// each Interval.
type Limiter struct {
	Burst    int
	Interval time.Duration
	Now      func() time.Time

	mu   sync.Mutex
	left map[uint32]*rate.Limiter // by user; guarded by mu; a user who is not in it has the whole burst
}

// maxLimited bounds the users that are remembered at one time.
const maxLimited = 1 << 12

// Take uses up one request of a user. Where there is none left, it returns after which time there is.
func (l *Limiter) Take(user uint32) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.Now()
	own := l.left[user]
	if own == nil {
		if len(l.left) >= maxLimited {
			l.forget(now)
		}
		if len(l.left) >= maxLimited {
			return l.Interval, false
		}
		if l.left == nil {
			l.left = make(map[uint32]*rate.Limiter)
		}
		own = rate.NewLimiter(rate.Every(l.Interval), l.Burst)
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
func (l *Limiter) forget(now time.Time) {
	for user, own := range l.left {
		if own.TokensAt(now) >= float64(l.Burst) {
			delete(l.left, user)
		}
	}
}
