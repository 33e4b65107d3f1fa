package index

import "sync"

// costCache keeps values up to a total cost. Above it values are dropped, in no order.
type costCache[K comparable, V any] struct {
	limit int

	mu      sync.Mutex // guards all below
	cost    int
	drops   uint64 // see fill
	entries map[K]costEntry[V]
}

type costEntry[V any] struct {
	value V
	cost  int
}

func newCostCache[K comparable, V any](limit int) *costCache[K, V] {
	return &costCache[K, V]{limit: limit, entries: make(map[K]costEntry[V])}
}

// get returns a value. If there is none, it may be read elsewhere: drops is for fill then.
func (c *costCache[K, V]) get(k K) (v V, drops uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	one, ok := c.entries[k]
	return one.value, c.drops, ok
}

// fill puts in what was read elsewhere since get, unless the key has a newer value by now, or
// something was dropped meanwhile: then the value may be of before the drop.
func (c *costCache[K, V]) fill(drops uint64, k K, v V, cost int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, newer := c.entries[k]; drops == c.drops && !newer {
		c.put(k, v, cost)
	}
}

// set puts in a new value.
func (c *costCache[K, V]) set(k K, v V, cost int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.put(k, v, cost)
}

func (c *costCache[K, V]) drop(k K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drops++
	c.remove(k)
}

func (c *costCache[K, V]) put(k K, v V, cost int) {
	c.remove(k)
	c.entries[k] = costEntry[V]{v, cost}
	c.cost += cost
	for other := range c.entries { // any one: Go's order is as good as random
		if c.cost <= c.limit {
			return
		}
		c.remove(other)
	}
}

func (c *costCache[K, V]) remove(k K) {
	c.cost -= c.entries[k].cost
	delete(c.entries, k)
}
