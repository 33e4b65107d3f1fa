package unixsock

import (
	"sync/atomic"
	"time"
)

// A hit takes a tenth of a millisecond, and to wake another goroutine for it costs a fifth of that.
// So the goroutine that reads an Acquire answers it, too, and reads on afterwards. Where the answer
// takes longer, a timer passes the reading on to a new goroutine: requests that follow on the
// connection, Cancel among them, wait that long at most.
const answerInline = time.Millisecond

// inline answers, and tells whether the goroutine still is the one that reads. Otherwise another one
// does by then.
func (c *connection) inline(answer func()) bool {
	turn := new(atomic.Bool) // of who comes first: the end of the answer, or the timer
	timer := time.AfterFunc(answerInline, func() {
		if turn.CompareAndSwap(false, true) {
			c.readOn()
		}
	})
	defer timer.Stop()
	answer()
	return turn.CompareAndSwap(false, true)
}
