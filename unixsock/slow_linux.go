package unixsock

import (
	"fmt"

	"github.com/epcached/epcached/internal/slowfile"
	"github.com/epcached/epcached/unixsock/wire"
)

// A file on FUSE or a network file system may never answer, and each call about it, also its close,
// holds a thread for as long. Go aborts the process at 10,000 threads. Therefore requests with such
// files, and closes of them, count as slow until they end, and their number is bounded for each
// user and in all.

// closeLimitFactor times SlowPerUID is the number of slow operations at which a user's connections
// are closed. Only closes can reach it.
const closeLimitFactor = 4

// tooSlow fails if the user, or all users, have more slow operations than times the limits.
func (c *connection) tooSlow(times int64) error {
	own, limits := c.user.slow.Load(), &c.server.limits
	if own <= times*int64(limits.SlowPerUID) &&
		(own <= 1 || c.server.slow.Load() <= times*int64(limits.Slow)) {
		return nil
	}
	return &Error{Class: wire.ErrorClass_BUSY,
		Text: fmt.Sprintf("%d requests of this user wait for file systems that do not "+
			"respond", own),
		Hint: "copy the models from FUSE or a network file system to a local one"}
}

func (c *connection) countSlow(n int64) {
	c.user.slow.Add(n)
	c.server.slow.Add(n)
}

// endSlow runs a function that closes slow files on a goroutine of its own. Closes are not queued,
// because a worker that starts closes what the daemon has open, and would wait for these files.
func (c *connection) endSlow(end func()) {
	c.countSlow(1)
	go func() {
		defer c.countSlow(-1)
		end()
	}()
}

// closeAll closes descriptors that the user sent, and does not wait for those of slow files.
func (c *connection) closeAll(fds []int) {
	var slow []int
	for _, fd := range fds {
		if _, is, _ := slowfile.Stat(fd); is {
			slow = append(slow, fd)
		} else {
			closeAll([]int{fd})
		}
	}
	if len(slow) > 0 {
		c.endSlow(func() { closeAll(slow) })
	}
}
