package unixsock

import (
	"errors"
	"syscall"
	"time"
)

// To wake a goroutine that reads and then wakes the caller takes longer than the daemon's work for a hit.
// So the caller of the only request reads its answer, in one system call that blocks. Answers that take
// longer, and those to requests that came meanwhile, are left to a goroutine, the reader. It stops when no
// answer is to come, also of those whose callers gave up: an unread descriptor keeps its build leased.

// ownReadLimit is how long a caller reads, rounded up to the kernel's ticks; its context can end
// meanwhile, and is looked at afterwards.
const ownReadLimit = 2 * time.Millisecond

// takeReading makes the caller the reader, until rest, unless there is one; it reports whether.
func (c *Client) takeReading() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.reading
	c.reading = true
	return !was
}

func (c *Client) readOn() {
	if c.takeReading() {
		go c.read()
	}
}

// rest ends the reading where no answer is to come, and reports whether. Close waits for the goroutine that
// reads at that moment, which ends the connection.
func (c *Client) rest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reading = len(c.calls) > 0 || c.closed.Load()
	return !c.reading
}

// readOwn returns when the answer to a request that was sent has come, or another goroutine reads.
func (c *Client) readOwn() {
	if !c.takeReading() {
		return
	}
	c.stream.soon = true
	err := c.receive(c.stream.envelope(0))
	c.stream.soon = false
	switch {
	case err != nil && !errors.Is(err, syscall.EAGAIN):
		c.end(err)
	case err != nil || !c.rest():
		go c.read()
	}
}
