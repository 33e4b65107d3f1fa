package unixsock

import (
	"sync/atomic"
	"time"
)

// pace spreads events of one user over time. The zero value is ready for use.
type pace struct {
	next atomic.Int64 // UnixNano at which the next event would be due without a burst
}

// wait returns how long an event has to wait, so that events follow each other by interval on
// average, after a burst without a wait.
func (p *pace) wait(now time.Time, interval time.Duration, burst int) time.Duration {
	for {
		next := p.next.Load()
		due := max(next, now.Add(-time.Duration(burst)*interval).UnixNano())
		if p.next.CompareAndSwap(next, due+int64(interval)) {
			return max(0, time.Duration(due-now.UnixNano()))
		}
	}
}
