package compilers

import (
	"strings"
	"sync"
)

// Tail keeps the last bytes of what is written to it. It never fails and never blocks, so that a worker that floods its standard error gets neither
// stuck nor our memory.
type Tail struct {
	Limit int // bytes that are kept

	mu   sync.Mutex // guards kept and cut
	kept []byte
	cut  bool
}

// Write keeps the end of p.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	if len(p) > t.Limit {
		p, t.cut = p[len(p)-t.Limit:], true
	}
	t.kept = append(t.kept, p...)
	if len(t.kept) > 2*t.Limit { // moved only now and then: writes are small
		t.trim()
	}
	return n, nil
}

func (t *Tail) trim() {
	if extra := len(t.kept) - t.Limit; extra > 0 {
		t.kept, t.cut = append(t.kept[:0:0], t.kept[extra:]...), true
	}
}

// String is what was kept, with a mark where more was written.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trim()
	if t.cut {
		return "[...]" + string(t.kept)
	}
	return string(t.kept)
}

// LastWords shortens a long message to its end: ONNX Runtime begins with where in its source it was,
// and the cause comes last.
func LastWords(text string) string {
	const most = 400
	if len(text) <= most {
		return text
	}
	return "..." + strings.ToValidUTF8(text[len(text)-most:], "")
}
