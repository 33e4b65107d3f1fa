package cache

// Idle tells whether nothing is being compiled and nobody holds what was served since the start: who keeps the cache open for others
// only may close it. It looks into the folder of every view that is in use, so it is not for each request.
func (c *Cache) Idle() bool {
	if c.flights.count() > 0 {
		return false
	}
	return !c.views.AnyHeld()
}
