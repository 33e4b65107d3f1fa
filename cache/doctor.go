package cache

import "context"

// Advice is one thing that was looked at, and what to do about it.
type Advice struct {
	Severity string // "problem", "warning", "ok"
	Subject  string // "disk", "runtime /opt/ort", ...
	Text     string
	Hint     string
}

// Doctor looks for what is wrong on this machine.
func (c *Cache) Doctor(ctx context.Context, p Peer) ([]Advice, error) {
	return nil, fail(Unavailable, nil, "no advice yet")
}
