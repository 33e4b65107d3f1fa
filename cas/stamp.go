package cas

import "sync"

// Stamp is what lets us believe that a file is still the one we looked at.
// Two stamps of one file are equal (==) unless somebody changed the file, its
// mode or its names, or another file has taken its place.
type Stamp struct {
	Dev, Ino     uint64
	Size         int64  // bytes
	Mtime, Ctime int64  // nanoseconds since 1970
	Boot         string // "" when the file was synced, else the boot that the stamp dies with
}

// Holds reports whether a file that now has the stamp seen is the one that s
// was taken of. The stamp of a file that was not synced holds in its own boot
// only: after a power cut size and times may be back without the bytes.
func (s Stamp) Holds(seen Stamp) bool {
	if s.Boot != "" && s.Boot != Boot() {
		return false
	}
	seen.Boot = s.Boot
	return s == seen
}

// StampBook remembers the stamps of verified blobs over a restart; package
// index has one. What it forgets costs hashing again, nothing else.
type StampBook interface {
	LoadStamp(Digest) (Stamp, bool)
	SaveStamp(Digest, Stamp) error
	ForgetStamp(Digest) error
}

// stampCache holds stamps in memory, so that a hit opens no transaction and waits for nobody.
type stampCache struct {
	book StampBook // nil: nothing outlives the process

	mu   sync.RWMutex // guards held
	held map[Digest]Stamp
}

const maxStamps = 1 << 15 // bounds memory to a few megabytes. Others are looked up in the book

func (c *stampCache) load(d Digest) (Stamp, bool) {
	c.mu.RLock()
	s, ok := c.held[d]
	c.mu.RUnlock()
	if ok || c.book == nil {
		return s, ok
	}
	if s, ok = c.book.LoadStamp(d); ok {
		c.mu.Lock()
		if now, renewed := c.held[d]; renewed {
			s = now // somebody saved one while we asked the book
		} else {
			c.hold(d, s)
		}
		c.mu.Unlock()
	}
	return s, ok
}

// hold is called with mu held for writing. Without a book nothing is dropped: it could not return.
func (c *stampCache) hold(d Digest, s Stamp) {
	if c.book != nil && len(c.held) >= maxStamps {
		for other := range c.held { // any one: Go's order is as good as random
			delete(c.held, other)
			break
		}
	}
	c.held[d] = s
}

func (c *stampCache) save(d Digest, s Stamp) {
	c.mu.Lock()
	c.hold(d, s)
	c.mu.Unlock()
	if c.book != nil {
		// A stamp that is not kept costs hashing after the next start.
		_ = c.book.SaveStamp(d, s)
	}
}

// forget tells the book first, so that a load in between cannot bring the stamp back.
func (c *stampCache) forget(d Digest) {
	if c.book != nil {
		// A stamp that stays behind fits no file: inode and times are another's.
		_ = c.book.ForgetStamp(d)
	}
	c.mu.Lock()
	delete(c.held, d)
	c.mu.Unlock()
}
