package cache

import (
	"sync"
	"time"

	"github.com/epcached/epcached/index"
)

// uses counts hits in memory, so that a hit writes nothing.
type uses struct {
	mu    sync.Mutex
	since map[index.BuildID]*use // since the last flush; guarded by mu
}

type use struct {
	last  time.Time
	hits  uint64
	saved float64 // seconds of compiling
}

func (u *uses) note(b *index.Build, at time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	one := u.since[b.ID]
	if one == nil {
		one = &use{}
		u.since[b.ID] = one
	}
	one.last = at
	one.hits++
	one.saved += b.CompileSeconds
}

// flushUses hands what was counted to the index. A crash loses at most what came since the last flush.
func (c *Cache) flushUses() {
	c.uses.mu.Lock()
	since := c.uses.since
	c.uses.since = make(map[index.BuildID]*use)
	c.uses.mu.Unlock()
	var hits, saved uint64
	for id, one := range since {
		hits += one.hits
		saved += uint64(one.saved * 1000)
		if err := c.index.Use(id, one.last, one.hits, one.saved); err != nil {
			c.log.Warn("use not kept", "build", id.String(), "error", err)
		}
	}
	if hits > 0 {
		c.index.Count("hits", hits)
		c.index.Count("saved_milliseconds", saved)
	}
}
