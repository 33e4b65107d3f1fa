package index

import (
	"container/list"
	"sync"
)

// lru keeps the values that were used last, up to a total cost.
type lru[K comparable, V any] struct {
	limit int

	mu    sync.Mutex // guards all below
	cost  int
	turn  uint64 // counts drops, see fill
	order list.List
	at    map[K]*list.Element
}

type lruEntry[K comparable, V any] struct {
	key   K
	value V
	cost  int
}

func newLRU[K comparable, V any](limit int) *lru[K, V] {
	return &lru[K, V]{limit: limit, at: make(map[K]*list.Element)}
}

func (c *lru[K, V]) get(k K) (v V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.at[k]
	if !ok {
		return v, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*lruEntry[K, V]).value, true
}

// now is to be asked before a value is read elsewhere, for fill.
func (c *lru[K, V]) now() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.turn
}

// fill puts in what was read elsewhere since turn, unless the key has a newer
// value by now, or something was dropped meanwhile: then the value may be of
// before the drop.
func (c *lru[K, V]) fill(turn uint64, k K, v V, cost int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, newer := c.at[k]; turn == c.turn && !newer {
		c.put(k, v, cost)
	}
}

// set puts in a new value.
func (c *lru[K, V]) set(k K, v V, cost int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.put(k, v, cost)
}

func (c *lru[K, V]) drop(k K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.turn++
	if e, ok := c.at[k]; ok {
		c.remove(e)
	}
}

func (c *lru[K, V]) put(k K, v V, cost int) {
	if e, ok := c.at[k]; ok {
		c.remove(e)
	}
	c.at[k] = c.order.PushFront(&lruEntry[K, V]{k, v, cost})
	for c.cost += cost; c.cost > c.limit; {
		c.remove(c.order.Back())
	}
}

func (c *lru[K, V]) remove(e *list.Element) {
	entry := c.order.Remove(e).(*lruEntry[K, V])
	delete(c.at, entry.key)
	c.cost -= entry.cost
}
