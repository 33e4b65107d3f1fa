package memo

import "sync"

// CostCache is a cache of values up to a total cost, beyond which it drops random ones. It is safe
// for concurrent use.
type CostCache[K comparable, V any] struct {
	limit int

	mu      sync.Mutex // guards the fields below
	cost    int
	drops   uint64 // see Fill
	entries map[K]costEntry[V]
}

type costEntry[V any] struct {
	value V
	cost  int
}

// NewCostCache returns a cache without values for a total cost of limit.
func NewCostCache[K comparable, V any](limit int) *CostCache[K, V] {
	return &CostCache[K, V]{limit: limit, entries: make(map[K]costEntry[V])}
}

// Get returns a value. If there is none, the caller may read it elsewhere and pass drops to Fill.
func (c *CostCache[K, V]) Get(k K) (v V, drops uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	one, ok := c.entries[k]
	return one.value, c.drops, ok
}

// Fill adds a value that was read elsewhere since Get, unless the key has a newer value, or any
// value was dropped in the meantime, because then this one may be older than the drop.
func (c *CostCache[K, V]) Fill(drops uint64, k K, v V, cost int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, newer := c.entries[k]; drops == c.drops && !newer {
		c.put(k, v, cost)
	}
}

func (c *CostCache[K, V]) Set(k K, v V, cost int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.put(k, v, cost)
}

func (c *CostCache[K, V]) Drop(k K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drops++
	c.remove(k)
}

func (c *CostCache[K, V]) put(k K, v V, cost int) {
	c.remove(k)
	c.entries[k] = costEntry[V]{v, cost}
	c.cost += cost
	for other := range c.entries { // a random one, because Go's order is random
		if c.cost <= c.limit {
			return
		}
		c.remove(other)
	}
}

func (c *CostCache[K, V]) remove(k K) {
	c.cost -= c.entries[k].cost
	delete(c.entries, k)
}
