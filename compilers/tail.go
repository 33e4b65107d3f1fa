package compilers

import "sync"

// tail keeps the last bytes of what is written to it. It never fails and never blocks, so that a worker that floods its standard error gets neither
// stuck nor our memory.
type tail struct {
	mu    sync.Mutex // guards kept and cut
	limit int
	kept  []byte
	cut   bool
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	if len(p) > t.limit {
		p, t.cut = p[len(p)-t.limit:], true
	}
	t.kept = append(t.kept, p...)
	if len(t.kept) > 2*t.limit { // moved only now and then: writes are small
		t.trim()
	}
	return n, nil
}

func (t *tail) trim() {
	if extra := len(t.kept) - t.limit; extra > 0 {
		t.kept, t.cut = append(t.kept[:0:0], t.kept[extra:]...), true
	}
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trim()
	if t.cut {
		return "[...]" + string(t.kept)
	}
	return string(t.kept)
}
