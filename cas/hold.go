package cas

import (
	"context"
	"io"
	"slices"
	"sync"
)

// Hold keeps the blobs that somebody is about to refer to from being removed
// by RemoveUnless: from the moment at which they are stored, or found to be
// there, until Release. It may be used by several goroutines.
//
// Who stores a blob through a Hold and then writes down that it is needed
// waits for no other removal than one of that very blob.
type Hold struct {
	s *Store

	mu   sync.Mutex // guards kept
	kept []Digest   // as often as it was kept
}

// Hold begins to keep blobs. The caller releases it.
func (s *Store) Hold() *Hold { return &Hold{s: s} }

// Source is what Put reads.
type Source interface {
	io.ReaderAt
	Size() int64
}

// Keep keeps a blob that is there already, and reports whether it is.
func (h *Hold) Keep(ctx context.Context, d Digest) (bool, error) {
	unlock, err := h.s.locks.Lock(ctx, d)
	if err != nil {
		return false, err
	}
	defer unlock()
	if !h.s.Has(d) {
		return false, nil
	}
	h.keep(d)
	return true, nil
}

// Kept returns the blobs, each once.
func (h *Hold) Kept() []Digest {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := slices.SortedFunc(slices.Values(h.kept), Digest.Compare)
	return slices.Compact(out)
}

// Release lets them go. It may be called more than once.
func (h *Hold) Release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.s.heldMu.Lock()
	defer h.s.heldMu.Unlock()
	for _, d := range h.kept {
		if h.s.held[d]--; h.s.held[d] == 0 {
			delete(h.s.held, d)
		}
	}
	h.kept = nil
}

// keep is called with the blob's lock held.
func (h *Hold) keep(d Digest) {
	h.mu.Lock()
	h.kept = append(h.kept, d)
	h.mu.Unlock()
	h.s.heldMu.Lock()
	h.s.held[d]++
	h.s.heldMu.Unlock()
}
