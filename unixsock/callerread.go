package unixsock

import (
	"errors"
	"syscall"
	"time"
)

// To wake a goroutine that reads and then wakes the caller takes longer than the daemon's work for
// a hit. So the caller of the only request reads its answer, in one system call that blocks.
// Answers that take longer, and those to requests that came meanwhile, are left to a goroutine, the
// reader. It stops when no answer is to come, also of those with callers that gave up: an unread
// descriptor keeps its build leased.

// callerReadLimit is how long a caller reads, rounded up to the kernel's ticks; its context can end
// meanwhile, and is looked at afterwards.
const callerReadLimit = 2 * time.Millisecond

// becomeReader makes the caller the reader, until rest, unless there is one; it reports whether.
func (c *Client) becomeReader() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.reading
	c.reading = true
	return !was
}

func (c *Client) continueReading() {
	if c.becomeReader() {
		go c.read()
	}
}

// stopReading ends the reading where no answer is to come, and reports whether. Close waits for the
// goroutine that reads at that moment, which ends the connection.
func (c *Client) stopReading() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reading = len(c.calls) > 0 || c.closed.Load()
	return !c.reading
}

// readOwnAnswer returns when the answer has come, or another goroutine reads.
func (c *Client) readOwnAnswer() {
	if !c.becomeReader() {
		return
	}
	c.stream.deadlineSet = true
	err := c.receive(c.stream.envelope(0))
	c.stream.deadlineSet = false
	switch {
	case err != nil && !errors.Is(err, syscall.EAGAIN):
		c.end(err)
	case err != nil || !c.stopReading():
		go c.read()
	}
}
