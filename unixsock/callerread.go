package unixsock

import (
	"errors"
	"syscall"
	"time"
)

// Waking a reader goroutine, which then wakes the caller, takes longer than the daemon's work for a
// hit. Therefore, if there is only one request, its caller reads the answer itself, in one blocking
// system call. A goroutine, the reader, reads slower answers and those to requests that begin in
// the meantime. It stops only when no answer is outstanding, also those whose callers gave up,
// because an unread descriptor keeps its build leased.

// callerReadLimit is how long a caller reads, rounded up to the kernel's ticks. The end of its
// context is noticed only afterwards.
const callerReadLimit = 2 * time.Millisecond

// becomeReader makes the caller the reader until stopReading, and reports false if there is a
// reader.
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

// stopReading stops reading if no answer is outstanding, and reports whether it did. Close waits
// for the current reader, which ends the connection.
func (c *Client) stopReading() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reading = len(c.calls) > 0 || c.closed.Load()
	return !c.reading
}

// readOwnAnswer returns when the answer has arrived, or another goroutine reads.
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
