package cache

// Idle tells whether nothing is being compiled and nobody holds what was served since the start: who keeps the cache open for others
// only may close it. It looks into the folder of every view that is in use, so it is not for each request.
func (c *Cache) Idle() bool {
	if c.flights.count() > 0 {
		return false
	}
	c.views.mu.Lock()
	paths := make([]string, 0, len(c.views.live))
	for _, v := range c.views.live {
		paths = append(paths, v.path)
	}
	c.views.mu.Unlock()
	for _, path := range paths {
		if held, _ := leased(path); held { // a folder that cannot be opened is held by nobody
			return false
		}
	}
	return true
}
